# CPU image: the tested versions of constraints.txt.
#   docker build -f docker/cpu.Dockerfile -t megaponder:cpu .
#   docker run --rm -v "$PWD:/work" -w /work megaponder:cpu plan configs/pythia-410m-ponderlm.yaml
FROM python:3.11.7-slim-bookworm

# torch and megatron-core compile small C++ helpers at first use.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*

# Where the wheels with CUDA are not wanted, pass the address of PyTorch's CPU index.
ARG PIP_EXTRA_INDEX_URL=""

COPY pyproject.toml setup.py constraints.txt README.md LICENSE /opt/megaponder/
COPY megaponder /opt/megaponder/megaponder
COPY configs /opt/megaponder/configs
RUN cd /opt/megaponder \
    && pip install --no-cache-dir --constraint constraints.txt torch==2.13.0 \
    && pip install --no-cache-dir --constraint constraints.txt --editable '.[export,parquet]' \
    && megaponder --version

RUN useradd --create-home --uid 1000 ponder
USER ponder
WORKDIR /home/ponder
ENTRYPOINT ["megaponder"]
CMD ["--help"]
