"""What `megaponder inspect` says about a checkpoint; reads tensor data only to verify it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megaponder.checkpoint import manifest, reader
from megaponder.checkpoint.damage import damage
from megaponder.checkpoint.state import STATE, load_saved_config, load_state
from megaponder.errors import UserError

_PARTS = (
    ("embedding.", "embedding"), ("output_layer.", "head"), ("final_norm.", "norms"), ("layernorm.", "norms"),
    (".self_attention.", "attention"), (".mlp.", "mlp"),
)  # fmt: skip


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on disk."""

    path: Path
    step: int
    sequences: int
    tokens: int
    layout: dict[str, int]
    """Sizes of the layout that saved it: tensor, pipeline, data, and context if it is not 1.  It loads in any other."""
    model: str
    """The model in a few words."""
    method: str
    """Pondering method and its options."""
    parameters: dict[str, int]
    """Numbers of parameters by part, without padding rows of the vocabulary."""
    dtype: str
    """Number format of the parameters."""
    masters: bool
    """Whether FP32 master weights are stored as well."""
    bytes: int
    """Size of all files; 0 if there is no manifest."""
    damage: str | None
    """Why it cannot be used; None if it is complete and intact."""

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())


def count_parameters(tensors: Mapping[str, TensorStorageMetadata], vocab_size: int | None) -> dict[str, int]:
    """Numbers of `reader.parameters` by part, without padding rows of the vocabulary."""
    parts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "head", "method"), 0)
    for stored_name, tensor in tensors.items():
        name, shape = reader.module_name(stored_name), list(tensor.size)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight") and vocab_size is not None:
            shape[0] = min(vocab_size, shape[0])
        parts[next((part for sign, part in _PARTS if sign in name), "method")] += math.prod(shape)
    return {part: n for part, n in parts.items() if n}


def inspect_checkpoint(path: str | Path) -> CheckpointInfo:
    """Describe the checkpoint folder `path`, also a damaged one; UserError if too little of it can be read."""
    folder = Path(path)
    if not (folder / STATE).is_file():
        raise UserError(f"{folder} is not a checkpoint: it has no {STATE}.")
    reason = damage(folder)
    try:
        state, contents = load_state(folder)
        cfg = load_saved_config(folder)
        tensors = reader.parameters(folder)
    except (OSError, ValueError, KeyError, EOFError, UserError) as error:
        raise UserError(f"Checkpoint {folder} cannot be read ({reason or error}).") from None
    m = cfg.model
    heads = f"{m.num_heads} heads, FFN {m.ffn_size}, vocabulary {m.vocab_size}"
    options = ", ".join(f"{k}={v}" for k, v in cfg.ponder.options.items())
    dtypes = {str(t.properties.dtype).removeprefix("torch.") for t in tensors.values()}
    return CheckpointInfo(
        path=folder,
        step=state.step,
        sequences=state.sequences,
        tokens=state.tokens,
        layout=contents.layout,
        model=f"{m.preset or m.family} ({m.num_layers} layers, hidden {m.hidden_size}, {heads})",
        method=cfg.ponder.method + (f" ({options})" if options else ""),
        parameters=count_parameters(tensors, m.vocab_size),
        dtype=", ".join(sorted(dtypes)),
        masters=contents.masters,
        bytes=manifest.size(folder) if (folder / manifest.MANIFEST).is_file() else 0,
        damage=reason,
    )
