"""Plain tensors (`names`) of a Hugging Face folder, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaponder.config.schema import RunConfig
from megaponder.errors import UserError
from megaponder.export import looped, names, native, targets
from megaponder.export.formats import FORMATS
from megaponder.export.public_code import UNUSED, kind_of


def to_plain(hf: dict[str, Any], tensors: names.Tensors, cfg: RunConfig, source: Path) -> names.Tensors:
    """Plain tensors of any folder `source` that `run_config` accepts, in FP32."""
    model = cfg.model
    assert model.num_heads is not None
    kind = hf["model_type"]
    form = FORMATS.get(kind)
    if kind_of(hf) is not None:
        tensors = {name: tensor for name, tensor in tensors.items() if not UNUSED.fullmatch(name)}
    if kind in looped.KINDS:
        plain = looped.to_plain(kind, tensors, cfg)
    else:
        plain = (
            targets.without_second_head(tensors) if form is None else native.from_native(tensors, form, model.num_heads)
        )
    if model.tie_embeddings:
        head = plain.get("lm_head.weight")
        if head is not None and not head.equal(plain.get("model.embed_tokens.weight", head)):
            raise UserError(
                f"{source}: tie_word_embeddings is true, but the weights of the head differ from those of the "
                "embedding; set it to false in a copy of config.json."
            )
        plain = {name: tensor for name, tensor in plain.items() if name != "lm_head.weight"}
    return {name: tensor.float() for name, tensor in plain.items()}
