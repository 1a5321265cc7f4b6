"""From a Hugging Face folder to a checkpoint that loads in any layout."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaponder.checkpoint import origin
from megaponder.checkpoint.choose import is_own
from megaponder.checkpoint.state import TrainState
from megaponder.config.load import dump
from megaponder.config.model import short_reach
from megaponder.config.schema import RunConfig
from megaponder.errors import UserError
from megaponder.export import folder, kept, layers, names, reference
from megaponder.export.configs import UPCYCLED
from megaponder.export.import_config import run_config, start_config
from megaponder.export.plain import to_plain
from megaponder.export.public_code import kind_of
from megaponder.export.requirements import require_transformers
from megaponder.export.save import refuse_taken, save_weights
from megaponder.ponder.settings import table_rows


@dataclass(frozen=True)
class Imported:
    """What was written."""

    checkpoint: Path
    config: RunConfig
    parameters: int
    max_difference: float
    """Largest difference from the Hugging Face model's logits, over the largest logit."""
    code: str | None = None
    """PonderLM or PonderLM-2: the public code that saved the folder."""
    kept: str = ""
    """Which layers were kept, and of how many; empty: all."""
    notes: tuple[str, ...] = ()
    """What the user should know of the folder."""

    def __str__(self) -> str:
        model, ponder = self.config.model, self.config.ponder
        options = ", ".join(f"{name} {value}" for name, value in ponder.options.items() if self.code)
        theirs = (
            f"those of this project's decoding of a {self.code} folder" if self.code else "the Hugging Face model's"
        )
        return (
            f"{self.checkpoint}: {model.family} model of {self.parameters:,} parameters, method {ponder.method}"
            f"{f' ({options})' if options else ''}.\n"
            f"Logits equal {theirs}: largest difference {self.max_difference:.1e} of the largest logit"
            f"{f' with all layers; {self.kept} are kept' if self.kept else ''}.\n"
            f"{''.join(f'{note}{chr(10)}' for note in self.notes)}"
            f"Train from it: megaponder train {self.checkpoint.parents[1] / 'config.yaml'} --data.train DATA "
            "--train.tokens N"
        )


def import_hf(
    source: str | Path,
    out: str | Path,
    *,
    ignore: list[str] | None = None,
    force: bool = False,
    tolerance: float = 1e-4,
    trust_remote_code: bool = False,
    method: str | None = None,
    only: str | None = None,
) -> Imported:
    """Write the run folder `out` with one weights-only checkpoint (step 0) of a Hugging Face folder.

    Folders of the families in docs/families.md become vanilla models, exports with modelling code keep their method,
    and so do folders of the public PonderLM and PonderLM-2 code; of the latter `method` must say which one it is.  Only
    safetensors are read, and modelling code that is not this version's is run only with `trust_remote_code`.  Start
    training from it with the config.yaml of `out`; a different method may be set there.  `only` names the layers that
    are kept, as 0-3,10-21 (`layers`): the logits are compared with all of them.
    Raises UserError for a config field that the backbones cannot represent, or that `ignore` names without its being
    known to be harmless, for weights that do not match, and if the logits of the two models differ by more than
    `tolerance` of the largest logit.
    """
    require_transformers("megaponder import")
    reference.check_tolerance(tolerance)
    source, out = Path(source), Path(out)
    _refuse_other_folders(source)
    refuse_taken(out / "checkpoints", force)  # before minutes of loading
    hf = folder.read_config(source)
    cfg = run_config(hf, source, out, frozenset(ignore or ()), method)
    aside, lost = kept.read(hf, source, int(cfg.model.vocab_size or 0))
    start = TrainState(upcycled=_upcycled(hf, source))
    numbers = None if only is None else layers.chosen(only, cfg)
    tensors = folder.read_weights(source)
    if bad := sorted(name for name, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()):
        raise UserError(f"{source}: {bad[0]} has values that are not finite.")
    from megaponder.export.load import build_model, load_folder, refuse_too_large

    refuse_too_large(source, hf, tensors)
    prompts, code = reference.prompts(cfg), kind_of(hf)
    # transformers' class would run a public folder without its passes
    model = None if code else load_folder(source, trust_remote_code=trust_remote_code)
    plain = to_plain(hf, tensors, cfg, source)
    del tensors
    model = model or build_model(cfg, plain)  # either of them says which weights do not fit
    count = sum(t.numel() for t in plain.values())
    state = names.to_stage(plain, cfg.model, table_rows(cfg))
    del plain
    theirs = [reference.export_logits(model, ids) for ids in prompts]
    del model
    gc.collect()  # models of transformers refer to themselves
    with reference.engine(cfg, state) as engine:
        if numbers is None:
            state.clear()  # the engine has copies
        ours = [reference.engine_logits(engine, ids, tolerance) for ids in prompts]
        worst = reference.agree(out, ours, theirs, tolerance)
        if numbers is None:
            checkpoint = save_weights(out / "checkpoints", cfg, engine.stage, force=force, state=start)
    of_layers = ""
    if numbers is not None:
        of_layers = f"layers {only} of {cfg.model.num_layers}"
        cfg, state = layers.pick(cfg, state, numbers)
        count = sum(t.numel() for t in state.values())
        with reference.engine(cfg, state) as engine:
            checkpoint = save_weights(out / "checkpoints", cfg, engine.stage, force=force, state=start)
    kept.keep(aside, out)
    origin.record(out, "import", source)
    dump(start_config(cfg, out), out / "config.yaml")
    notes = tuple(note for note in (lost, short_reach(cfg.model)) if note)
    return Imported(checkpoint, cfg, count, worst, code, of_layers, notes)


def _upcycled(hf: dict[str, Any], source: Path) -> dict[str, Any]:
    """What the config.json of an export says that its mixture was made of; {} if it was not upcycled."""
    found = hf.get(UPCYCLED) or {}
    if not isinstance(found, dict):
        raise UserError(f"{source / 'config.json'}: {UPCYCLED} = {found!r}: it must be the record of an export.")
    return found


def _refuse_other_folders(source: Path) -> None:
    """UserError for what has no config.json because it is no Hugging Face folder at all."""
    if source.is_dir():
        if not (source / "config.json").exists() and is_own(source):
            raise UserError(
                f"{source} is a run or a checkpoint of megaponder, not a Hugging Face folder: train from it with "
                f"--checkpoint.load {source}, or write such a folder with megaponder export {source} FOLDER."
            )
    elif not source.exists():
        raise UserError(f"{source}: there is no such folder; a model of the Hugging Face hub must be downloaded first.")
    else:
        raise UserError(f"{source} is a file; name the folder that has the model's config.json and safetensors.")
