"""Where a run starts: at its newest complete checkpoint, at given weights, or at the beginning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron.core.transformer.module import MegatronModule

from megaponder import files
from megaponder.checkpoint import agree, folder, restore
from megaponder.checkpoint.choose import Choice
from megaponder.checkpoint.ema import Ema
from megaponder.checkpoint.local import Local
from megaponder.checkpoint.state import TrainState, load_state
from megaponder.config.schema import RunConfig
from megaponder.engine.zero import Updates
from megaponder.errors import ConfigError, UserError
from megaponder.ranks import on_first_rank
from megaponder.training.same_data import SameData
from megaponder.training.setup import refuse_other_model


def resume(
    cfg: RunConfig,
    stage: MegatronModule,
    optimizer: Updates,
    data: SameData,
    say: Callable[[str], None],
    ema: Ema | None = None,
    local: Local | None = None,
) -> tuple[TrainState, int]:
    """Load what checkpoint.resume and checkpoint.load request and report which it was.  All ranks call this.

    Returns the position and the step of the run folder's newest intact checkpoint: a local one may be ahead of it.
    """
    root = Path(cfg.run) / "checkpoints"
    found = on_first_rank(lambda: _sweep_and_list(root))
    if found and cfg.checkpoint.resume == "never":
        fix = "use auto, or another run folder"
        raise ConfigError("checkpoint.resume", "never", f"{root} contains checkpoints of an earlier run", fix)
    choice = agree.choose(root)
    saved = folder.step_of(choice.path) if choice.path is not None else 0
    if local is not None:
        part, told = local.agreed(saved)
        for sentence in told:
            say(sentence)
        if part is not None:
            for warning in on_first_rank(partial(_changes, cfg, part, data)):
                say(warning)
            return local.load(part), saved
    if choice.path is not None:
        return _continue(cfg, choice, stage, optimizer, data, say, ema), saved
    if choice.skipped:
        raise UserError(
            f"No checkpoint in {root} is intact: {' '.join(choice.sentences())} Restore one from a copy, or move them "
            "away to start from scratch."
        )
    if cfg.checkpoint.resume == "must":
        raise ConfigError("checkpoint.resume", "must", f"{root} contains no checkpoint to continue from", "use auto")
    if cfg.checkpoint.load is not None:
        path = agree.locate(cfg.checkpoint.load)
        for warning in on_first_rank(lambda: refuse_other_model(cfg, path, weights_only=True)):
            say(warning)
        for warning in on_first_rank(lambda: data.other_tokenizer(load_state(path)[1].tokenizers(), path)):
            say(warning)
        fresh, left = restore.load(path, stage, optimizer, ema)
        new = f"; newly initialised: {', '.join(fresh)}" if fresh else ""
        old = f"; ignored, since {cfg.ponder.method} does not use them: {', '.join(left)}" if left else ""
        say(f"Starting from the weights of {path}{new}{old}.")
        return TrainState(upcycled=on_first_rank(lambda: load_state(path)[0].upcycled)), 0
    return TrainState(), 0


def _continue(
    cfg: RunConfig,
    choice: Choice,
    stage: MegatronModule,
    optimizer: Updates,
    data: SameData,
    say: Callable[[str], None],
    ema: Ema | None,
) -> TrainState:
    path = choice.path
    assert path is not None
    on_first_rank(lambda: refuse_bare_weights(cfg, path))
    warnings = on_first_rank(lambda: _changes(cfg, path, data))
    for sentence in choice.sentences():
        say(sentence)
    state = restore.resume(path, stage, optimizer, ema)
    for warning in warnings:
        say(warning)
    return state


def _changes(cfg: RunConfig, path: Path, data: SameData) -> list[str]:
    """Warnings of what is different from the run that saved; ConfigError or UserError for what must not be."""
    return [*refuse_other_model(cfg, path), *data.refuse_changed(load_state(path)[1].data, path)]


def refuse_bare_weights(cfg: RunConfig, checkpoint: Path) -> None:
    """UserError for a checkpoint without optimizer state, such as an imported one: only its weights can be loaded."""
    if not load_state(checkpoint)[1].optimizer:
        raise UserError(
            f"run = {cfg.run!r}: {checkpoint} holds weights without optimizer state (megaponder import wrote it), so "
            f"there is nothing to continue; start a run in another folder from it, with --checkpoint.load {cfg.run}."
        )


def _sweep_and_list(root: Path) -> list[str]:
    files.refuse_lost_link(root)
    folder.sweep(root)
    files.sweep(root.parent)
    return [str(p) for p in folder.published(root).values()]
