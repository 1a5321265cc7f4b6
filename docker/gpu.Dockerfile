# GPU image on NVIDIA's PyTorch image, which brings torch, Transformer Engine and apex that fit each other.
#   docker build -f docker/gpu.Dockerfile -t megaponder:gpu .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/work" -w /work megaponder:gpu \
#       train configs/pythia-410m-ponderlm.yaml --run runs/first --data.train data/pile
ARG BASE=nvcr.io/nvidia/pytorch:26.02-py3
FROM ${BASE}

COPY pyproject.toml setup.py README.md LICENSE /opt/megaponder/
COPY megaponder /opt/megaponder/megaponder
COPY configs /opt/megaponder/configs
COPY launch /opt/megaponder/launch

# The image's torch is a pre-release by its version number, which pip would replace to meet `torch>=2.11`: therefore the
# two packages that ask for torch come without their dependencies, and the others by name.
RUN pip install --no-cache-dir --no-deps megatron-core==0.16.1 --editable /opt/megaponder \
    && pip install --no-cache-dir \
        filelock matplotlib numpy orjson prometheus-client psutil pydantic rich ruamel.yaml==0.19.1 safetensors sentencepiece==0.2.3 \
        tensorboard tokenizers==0.23.3 transformers==5.24.0 zstandard \
    && megaponder --version

RUN useradd --create-home --uid 1001 ponder
USER ponder
WORKDIR /home/ponder
ENTRYPOINT ["megaponder"]
CMD ["--help"]
