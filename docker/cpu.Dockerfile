# CPU image: the tested versions of constraints.txt.
#   docker build -f docker/cpu.Dockerfile -t megaponder:cpu .
#   docker run --rm -v "$PWD:/work" -w /work megaponder:cpu plan configs/pythia-410m-ponderlm.yaml
FROM python:3.11.7-slim-bookworm

# Where the wheels with CUDA are not wanted, pass the address of PyTorch's CPU index.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1

WORKDIR /opt/megaponder
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY docker/install.sh docker/health.py docker/
COPY megaponder megaponder
COPY configs configs
RUN docker/install.sh python export,parquet && useradd --create-home --uid 1000 ponder

USER 1000
WORKDIR /home/ponder
HEALTHCHECK --interval=60s --start-period=10m CMD ["python", "/opt/megaponder/docker/health.py"]
ENTRYPOINT ["megaponder"]
CMD ["--help"]
