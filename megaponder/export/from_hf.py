"""From a Hugging Face folder to a checkpoint that loads in any layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaponder.config.schema import RunConfig
from megaponder.errors import UserError
from megaponder.export import folder, names, native, reference
from megaponder.export.formats import FORMATS
from megaponder.export.import_config import run_config
from megaponder.export.requirements import require_transformers
from megaponder.export.save import save_weights
from megaponder.ponder.settings import table_rows

DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Imported:
    """What was written."""

    checkpoint: Path
    config: RunConfig
    parameters: int
    max_difference: float
    """Largest difference from the Hugging Face model's logits, over the largest logit."""

    def __str__(self) -> str:
        model = self.config.model
        return (
            f"{self.checkpoint}: {model.family} model of {self.parameters:,} parameters, method "
            f"{self.config.ponder.method}.\n"
            f"Logits equal the Hugging Face model's: largest difference {self.max_difference:.1e} of the largest logit."
        )


def import_hf(
    source: str | Path,
    out: str | Path,
    *,
    ignore: list[str] | None = None,
    force: bool = False,
    tolerance: float = 1e-4,
    trust_remote_code: bool = False,
) -> Imported:
    """Write the run folder `out` with one weights-only checkpoint (step 0) of a Hugging Face folder.

    GPT-NeoX, Llama and GPT-2 folders become vanilla models, exports with modelling code keep their method.  Only
    safetensors are read, and modelling code that is not this version's is run only with `trust_remote_code`.  Start
    training from it with `checkpoint.load`; a different method may be set there.
    Raises UserError for a config field that the backbones cannot represent (unless named in `ignore`), for weights that
    do not match, and if the logits of the two models differ by more than `tolerance` of the largest logit.
    """
    require_transformers("megaponder import")
    reference.check_tolerance(tolerance)
    source, out = Path(source), Path(out)
    hf = folder.read_json(source, "config.json")
    cfg = run_config(hf, source, out, frozenset(ignore or ()))
    tensors = folder.read_weights(source)
    if bad := sorted(name for name, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()):
        raise UserError(f"{source}: {bad[0]} has values that are not finite.")
    count = sum(t.numel() for t in tensors.values())
    from megaponder.export.load import load_folder, refuse_too_large

    refuse_too_large(source, hf, tensors)
    state = names.to_stage(to_plain(hf, tensors, cfg), cfg.model, table_rows(cfg))
    del tensors
    prompts = reference.prompts(cfg)
    model = load_folder(source, trust_remote_code=trust_remote_code)
    theirs = [reference.export_logits(model, ids) for ids in prompts]
    del model
    with reference.engine(cfg, state) as engine:
        ours = [reference.engine_logits(engine, ids, tolerance) for ids in prompts]
        worst = reference.agree(out, ours, theirs, tolerance)
        checkpoint = save_weights(out / "checkpoints", cfg, engine.stage, force=force)
    return Imported(checkpoint, cfg, count, worst)


def to_plain(hf: dict[str, Any], tensors: names.Tensors, cfg: RunConfig) -> names.Tensors:
    """Plain tensors of any folder that `run_config` accepts, in FP32."""
    model = cfg.model
    assert model.num_heads is not None
    form = FORMATS.get(hf["model_type"])
    plain = tensors if form is None else native.from_native(tensors, form, model.num_heads)
    if model.tie_embeddings:
        plain = {name: tensor for name, tensor in plain.items() if name != "lm_head.weight"}
    return {name: tensor.float() for name, tensor in plain.items()}
