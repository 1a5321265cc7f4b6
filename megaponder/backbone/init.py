"""Initial weights by name: equal in every layout, since each parameter has its own random stream.

The stream is seeded by (seed, global name); the full matrix is drawn and every rank takes its rows, so a model at
TP=4, PP=8 starts with exactly the weights of the same model in one process.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from megaponder.config.trained import is_trained
from megaponder.ponder.base import PARAMETER_PREFIX

DRAWN_BYTES = 2**32
"""Main memory that a process may use for matrices that are being drawn, if one alone does not need more."""


def stream(seed: int, name: str) -> torch.Generator:
    """Random stream of one parameter."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def global_names(stage: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a pipeline stage under the names they have in a one-process model."""
    experts = _first_expert(stage)
    layers = stage.decoder.layers  # type: ignore[union-attr]
    offset = layers[0].layer_number - 1 if len(layers) else 0  # type: ignore[index, union-attr, arg-type]
    for name, parameter in stage.named_parameters():
        if name.startswith("decoder.layers."):
            index, rest = name.removeprefix("decoder.layers.").split(".", 1)
            name = f"decoder.layers.{int(index) + offset}.{rest}"
            if (found := _EXPERT.fullmatch(name)) is not None:
                place = int(found["local"] or found["grouped"]) + experts
                name = f"{found['mlp']}.experts.local_experts.{place}.{found['one'] or found['all']}.weight"
        yield name.replace("input_table.weight", "embedding.word_embeddings.weight"), parameter


_EXPERT = re.compile(
    r"(?P<mlp>.*\.mlp)\.experts\."
    r"(local_experts\.(?P<local>\d+)\.(?P<one>\w+)\.weight|(?P<all>\w+)\.weight(?P<grouped>\d+))"
)
"""A matrix of an expert: PyTorch's, or Transformer Engine's, which hold all experts of a rank."""


def _first_expert(stage: nn.Module) -> int:
    """Number of this rank's first expert."""
    found: Any = next((m.local_expert_indices for m in stage.modules() if hasattr(m, "local_expert_indices")), [0])
    return int(found[0])


def is_norm(name: str) -> bool:
    """Whether a parameter of this name belongs to a norm of the backbone."""
    return "layer_norm_" in name or "layernorm." in name or name.startswith("final_norm.")


def freeze_norms(stage: nn.Module) -> None:
    """Norms keep their weight of 1 and bias of 0."""
    for name, parameter in global_names(stage):
        if is_norm(name):
            parameter.requires_grad_(False)


def freeze_all_but(stage: nn.Module, only: Collection[str]) -> None:
    """Parameters outside of these groups (`config.trained`) get no gradient, no optimizer and no decay."""
    for name, parameter in global_names(stage):
        if not is_trained(name, only):
            parameter.requires_grad_(False)


def draw(shape: tuple[int, ...], kind: str, std: float, generator: torch.Generator) -> Tensor:
    """A matrix of the initialisation `kind` with this standard deviation."""
    weight = torch.empty(shape, dtype=torch.float32)
    if kind == "trunc_normal":
        return nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std, generator=generator)
    return nn.init.normal_(weight, std=std, generator=generator)


def whole_shape(name: str, parameter: nn.Parameter, tp: int, gated: bool) -> tuple[tuple[int, ...], int | None]:
    """(shape of the matrix before tensor-parallel sharding, dimension that is sharded or None).

    The first MLP matrix of SwiGLU is two matrices, gate and up, each sharded by itself: [2, F, H].
    """
    shape = list(parameter.shape)
    if not getattr(parameter, "tensor_model_parallel", False):
        return tuple(shape), None
    dim = int(parameter.partition_dim)  # type: ignore[attr-defined]
    shape[dim] *= tp
    if gated and name.endswith(".linear_fc1.weight"):
        return (2, shape[0] // 2, *shape[1:]), 1
    return tuple(shape), dim


def initialise(
    stage: nn.Module, *, seed: int, kind: str, std: float, output_factor: float, tp_rank: int, tp: int, gated: bool,
    up_factor: float = 1.0, split: tuple[int, int] = (1, 0), carried: Callable[[str], float] = lambda name: 1.0,
) -> None:  # fmt: skip
    """Set every weight of a stage; the method's own modules come initialised from their constructors.

    `split`: ranks over which each expert is split, and which of them this is.

    Factors on `std`: of attention-output and MLP-down matrices, of SwiGLU's up matrices, and by name those of
    `engine.transfer`.  A generator draws one number after the other, but parameters are drawn side by side: each has
    its own.
    """

    @torch.no_grad()
    def fill(named: tuple[str, nn.Parameter]) -> None:
        name, parameter = named
        if is_norm(name):
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            scale = output_factor if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 1.0
            ranks, rank = split if ".experts." in name else (tp, tp_rank)
            shape, dim = whole_shape(name, parameter, ranks, gated)
            copies = getattr(parameter, "copies", 1)  # routers of several passes, which start as one for all
            shape = (shape[0] // copies, *shape[1:])
            whole = draw(shape, kind, std * scale * carried(name), stream(seed, name))
            whole = whole.repeat(copies, *[1] * (len(shape) - 1)) if copies > 1 else whole
            if gated and name.endswith(".linear_fc1.weight"):
                whole[1] *= up_factor
            part = whole if dim is None else whole.chunk(ranks, dim=dim)[rank]
            parameter.copy_(part.reshape(parameter.shape))

    named = [(n, p) for n, p in global_names(stage) if not n.startswith(PARAMETER_PREFIX)]
    named.sort(key=lambda pair: -pair[1].numel())  # none of the long ones is left for the end
    with ThreadPoolExecutor(_drawers(max((p.numel() for _, p in named), default=1) * tp)) as pool:
        list(pool.map(fill, named))


def _drawers(largest: int) -> int:
    """Matrices that this process draws at the same time: its share of the node's cores, and of memory for the whole
    matrices, of which `largest` is the largest one's elements."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count() or 1)
    cores = len(os.sched_getaffinity(0)) // processes
    return max(1, min(cores, 16, DRAWN_BYTES // (4 * largest)))
