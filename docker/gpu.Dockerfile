# GPU image on NVIDIA's PyTorch image, which brings torch, Transformer Engine and apex that fit each other.
#   docker build -f docker/gpu.Dockerfile -t megaponder:gpu .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/work" -w /work megaponder:gpu \
#       train configs/pythia-410m-ponderlm.yaml --run runs/first --data.train data/pile
ARG BASE=nvcr.io/nvidia/pytorch:26.02-py3
FROM ${BASE}

WORKDIR /opt/megaponder
COPY pyproject.toml setup.py README.md LICENSE ./
COPY docker/gpu-requirements.txt docker/health.py docker/
COPY megaponder megaponder
COPY configs configs
COPY launch launch

# The image's torch is a pre-release by its version number, which pip would replace to meet `torch>=2.11`: therefore the
# two packages that ask for torch come without their dependencies, and the others by name.
RUN pip install --no-cache-dir --no-deps megatron-core==0.16.1 --editable . \
    && pip install --no-cache-dir --requirement docker/gpu-requirements.txt \
    && megaponder --version \
    && useradd --create-home --uid 1001 ponder

USER 1001
WORKDIR /home/ponder
HEALTHCHECK --interval=60s --start-period=10m CMD ["python", "/opt/megaponder/docker/health.py"]
ENTRYPOINT ["megaponder"]
CMD ["--help"]
