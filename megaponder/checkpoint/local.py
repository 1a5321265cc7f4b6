"""Local checkpoints: each rank writes its own part, alone, to a disk of its node; a restart of the same job reads them.

    <checkpoint.local>/<id of the run>/rank_00003/step_00000012/     tensors.pt, state.json, config.yaml, manifest.json

They can be frequent, since they need neither network nor agreement, and they never replace the checkpoints of the run
folder: they serve only the layout that wrote them, with each rank on its node again.  At a start the ranks take the
newest step that all of them find intact, if it is newer than the run folder's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megaponder.checkpoint import folder, manifest, optimizer_state, rng, writers
from megaponder.checkpoint.ema import Ema
from megaponder.checkpoint.model_state import layout
from megaponder.checkpoint.state import CONFIG, Contents, TrainState, load_state, save_state
from megaponder.config.load import dump
from megaponder.config.schema import RunConfig
from megaponder.errors import UserError, of_file
from megaponder.ranks import gather

TENSORS = "tensors.pt"
KEPT = 2
"""Steps that a rank keeps: while one rank has not finished the newest, all have the one before."""


class Local:
    """This rank's local checkpoints.  Only `agreed` is a collective."""

    def __init__(
        self, cfg: RunConfig, run_id: str, stage: MegatronModule, optimizer: MegatronOptimizer, ema: Ema | None
    ):
        assert cfg.checkpoint.local is not None
        self.cfg, self.stage, self.optimizer, self.ema = cfg, stage, optimizer, ema
        self.root = Path(cfg.checkpoint.local) / run_id / f"rank_{dist.get_rank():05d}"

    def save(self, state: TrainState, data: dict[str, Any], warn: Callable[[str], None]) -> None:
        """Write and publish this rank's part.  A disk that is full is a warning: the run folder has what counts."""
        path = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            path = folder.create(self.root, state.step)
            torch.save(self._tensors(), path / TENSORS)
            dump(self.cfg, path / CONFIG)
            save_state(path, state, Contents(optimizer_state.has_masters(self.stage.parameters()), layout(), data=data))
            folder.publish(path, self.root, state.step)
            folder.retain(self.root, state.step, KEPT, 0)
        except (OSError, RuntimeError) as error:
            if path is None and isinstance(error, RuntimeError):
                raise
            why = writers.explained(error, str((path or self.root) / TENSORS))
            if path is not None:
                folder.discard(path)
            warn(
                f"warning: rank {dist.get_rank()} could not write its local checkpoint of step {state.step} "
                f"({str(why).rstrip('.')}); training goes on."
            )

    def agreed(self, than: int) -> tuple[Path | None, list[str]]:
        """This rank's part of the newest step after `than` that all ranks have intact, if any, and what to tell."""
        mine: dict[int, Path] = {}
        why: str | None = None
        try:
            folder.sweep(self.root)
            for step, path in folder.published(self.root).items():
                reason = self._unusable(path) if step > than else None
                why = why or (reason and f"{path}: {reason}")
                if step > than and reason is None:
                    mine[step] = path
        except OSError as error:
            why = str(of_file(error) or error)
        said = gather((sorted(mine), why))
        newest = max((step for s in said for step in s.value[0]), default=0)
        best = max(set.intersection(*(set(s.value[0]) for s in said)), default=0)
        told = []
        odd = next((s for s in said if newest not in s.value[0] and (newest or s.value[1])), None)
        if odd is not None:
            what = f" of step {newest}" if newest else ""
            reason = f" ({odd.value[1].rstrip('.')})" if odd.value[1] else ""
            told.append(f"The local checkpoint{what} is not used: {odd.who} has no intact part of it{reason}.")
        if best:
            told.append(f"Resuming from the local checkpoint of step {best} in {self.root.parent} of each node.")
        return mine.get(best), told

    def load(self, path: Path) -> TrainState:
        """Put this rank's part in place: parameters, optimizer, averages, scales and random states, bit for bit."""
        state, _ = load_state(path)
        found = torch.load(path / TENSORS, map_location="cpu", weights_only=True, mmap=True)
        if self.stage.fp8 is not None and found["fp8"]:
            self.stage.fp8.allocate()
        own = {part: values for part, values in self._tensors().items() if part != "random"}
        for part, values in own.items():
            if _shapes(values) != _shapes(found[part]):
                raise UserError(f"{path} does not hold this model's {part}; remove {self.root.parent} on all nodes.")
        with torch.no_grad():
            for part, values in own.items():
                for name, tensor in values.items():
                    tensor.copy_(found[part][name])
        rng.load({name: value[None] for name, value in found["random"].items()})
        optimizer_state.set_step(self.optimizer, state.updates)
        return state

    def forget(self, after: int) -> None:
        """Delete steps after this one: the run has gone back behind them."""
        for step, path in folder.published(self.root).items():
            if step > after:
                folder.remove(path)

    def _unusable(self, path: Path) -> str | None:
        if (reason := manifest.damage(path)) is not None:
            return str(reason)
        try:
            _, contents = load_state(path)
        except ValueError as error:
            return str(error)
        return None if contents.layout == layout() else f"it belongs to the layout {contents.layout}"

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor of this rank's state, by part and name; those in place, so that loading may copy into them."""
        optimizer_state.allocate(self.optimizer)
        states: dict[str, Tensor] = {}
        for i, part in enumerate(optimizer_state.parts(self.optimizer)):
            for j, p in enumerate(optimizer_state.parameters(part.optimizer)):
                states |= {
                    f"{i}.{j}.{name}": part.optimizer.state[p][name] for name in optimizer_state.moments(part.optimizer)
                }
                states[f"{i}.{j}.param"] = p.detach()
        model = {n: t.detach() for n, t in self.stage.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        return {
            "model": model,
            "optimizer": states,
            "ema": {str(i): t for i, t in enumerate(self.ema.values())} if self.ema is not None else {},
            "fp8": self.stage.fp8.scales() if self.stage.fp8 is not None else {},
            "random": rng.states(),
        }


def _shapes(values: dict[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(t.shape), t.dtype) for name, t in values.items()}
