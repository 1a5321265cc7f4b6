"""The contents of a checkpoint's `state.json`: the run's position, in numbers that do not depend on the layout."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import pydantic

from megaponder import files
from megaponder.config.load import load_config
from megaponder.config.resolve import resolve
from megaponder.config.schema import RunConfig
from megaponder.errors import ConfigError, UserError

STATE = "state.json"
CONFIG = "config.yaml"

LARGEST = 1 << 24
"""Bytes of a state."""

Count = Annotated[int, pydantic.Field(ge=0, lt=2**62)]
Size = Annotated[int, pydantic.Field(gt=0, lt=2**31)]
Finite = Annotated[float, pydantic.Field(gt=-1e100, lt=1e100)]
Amount = Annotated[float, pydantic.Field(ge=0, lt=1e100)]


@dataclass
class TrainState:
    """Position of a run, written into every checkpoint."""

    step: Count = 0
    """Steps done, skipped ones included."""
    sequences: Count = 0
    """Sequences consumed by all ranks together: the data position, independent of the layout."""
    tokens: Count = 0
    """Tokens in these sequences."""
    skipped: Count = 0
    """Steps without an update, because their loss or gradient norm was bad."""
    losses: list[Finite] = field(default_factory=list)
    """Losses of the last steps, for spike detection; empty if that is off."""
    norms: list[Finite] = field(default_factory=list)
    """Gradient norms of the same steps."""
    selection: list[Finite] = field(default_factory=list)
    """alpha of the next step and the moving mean that it follows (`training.adaptive_alpha`); empty: alpha stays."""
    needed_flops: Amount | None = 0.0
    """Training FLOPs that the steps needed; None: not known, since an earlier version has saved the run."""
    executed_flops: Amount | None = 0.0
    """Those that were executed: with recomputed layers, and with halted tokens that were only masked."""
    seconds: Amount | None = 0.0
    """Time of the steps on rank 0, without evaluation, saving and restarts."""
    evaluation_due: bool = False
    """A request to stop interrupted the evaluation after the last step."""
    upcycled: dict[str, Any] = field(default_factory=dict)
    """`upcycle.record.Record` of the weights that the run started from, as plain data; {}: it has none."""

    @property
    def updates(self) -> int:
        """Optimizer updates done: Adam's own count."""
        return self.step - self.skipped

    def after(self, batch: int, sequence_length: int) -> TrainState:
        """The position one step later."""
        tokens = self.tokens + batch * sequence_length
        return replace(self, step=self.step + 1, sequences=self.sequences + batch, tokens=tokens, evaluation_due=False)


@dataclass
class Contents:
    """How the tensors of a checkpoint were written."""

    masters: bool
    """FP32 master weights are stored beside BF16 parameters."""
    layout: dict[str, Size] = field(default_factory=dict)
    """tensor, pipeline and data: the sizes of the run that saved (random states belong to them)."""
    optimizer: bool = True
    """Optimizer state is stored."""
    data: dict[str, str | dict[str, str | int | None]] = field(default_factory=dict)
    """`data.identity.Identity` of each dataset that the run was trained on, as plain data; a string
    (`data.check.earlier_identity`), or nothing at all, in checkpoints of earlier versions."""

    def tokenizers(self) -> set[str]:
        """Fingerprints of the datasets' tokenizers, as far as they are recorded."""
        kept = (one.get("tokenizer") for one in self.data.values() if isinstance(one, dict))
        return {value for value in kept if isinstance(value, str)}


def save_state(folder: Path, state: TrainState, contents: Contents) -> None:
    """Write `state.json`."""
    files.write_json(folder / STATE, {**asdict(state), "contents": asdict(contents)})


def load_state(folder: Path) -> tuple[TrainState, Contents]:
    """Read `state.json`; unknown keys of later versions are ignored.  ValueError if it is not one."""
    try:
        values: Any = json.loads(files.read_bounded(folder / STATE, LARGEST))
        if not isinstance(values, dict) or not isinstance(values.get("contents"), dict):
            raise ValueError("it has no contents")
        for name in ("needed_flops", "executed_flops", "seconds"):
            values.setdefault(name, None)
        state: TrainState = _build(TrainState, values)
        if state.skipped > state.step:
            raise ValueError(f"it has more skipped steps, {state.skipped}, than steps, {state.step}")
        if len(state.losses) != len(state.norms):
            raise ValueError(f"it has {len(state.losses)} losses and {len(state.norms)} norms")
        if state.selection and not (
            len(state.selection) == 2 and 0 <= state.selection[0] < 1 and state.selection[1] > 0
        ):
            raise ValueError(f"its selection is {state.selection}, which must be a share below 1 and a loss above 0")
        return state, _build(Contents, values["contents"])
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{STATE} is wrong: {where} = {first['input']!r}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{STATE} is not the state of a run ({error})") from None


def load_saved_config(folder: Path) -> RunConfig:
    """The configuration of the run that saved a checkpoint, with defaults for fields that did not exist yet; options
    that it does not state have the defaults of then.

    UserError, naming the file, if it is none.
    """
    from megaponder.ponder.settings import as_a_run_meant_it

    try:
        cfg = resolve(load_config(folder / CONFIG, []))
        return replace(cfg, ponder=as_a_run_meant_it(cfg.ponder))
    except ConfigError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None


def _build(cls: type, values: dict[str, Any]) -> Any:
    known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
    return _adapter(cls).validate_json(json.dumps(known), strict=True)  # strict Python mode would require instances


@lru_cache
def _adapter(cls: type) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(cls)
