"""What a comparison knows of a run, and runs that differ in their seed alone as one group."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megaponder.checkpoint.state import load_saved_config
from megaponder.config.schema import RunConfig
from megaponder.errors import UserError
from megaponder.inference import evaluation
from megaponder.inference.sweep import AS_TRAINED, HALTING, OTHER_PASSES, RANDOM
from megaponder.monitor import jsonl
from megaponder.plan.build import own_parameters
from megaponder.plan.flops import inference_flops, mean_executed, mean_needed
from megaponder.plan.parameters import model_parameters
from megaponder.ponder.settings import method_of
from megaponder.training import same_data

PART = "loss_"
"""Before the name of a named text, in the name of its loss."""


@dataclass(frozen=True)
class Point:
    """A held-out loss in training, and what had been spent on it."""

    tokens: int
    loss: float
    """Nats per token."""
    needed: float
    """Training FLOPs."""
    executed: float
    seconds: float | None
    """Training time; None where the run does not tell."""


@dataclass(frozen=True)
class Sweep:
    """The trained model with other thresholds or passes."""

    variant: str
    kind: str
    """`inference.sweep` has the kinds."""
    flops: float
    """Forward FLOPs of a token in decoding."""
    loss: float


@dataclass(frozen=True)
class Result:
    """One run."""

    name: str
    method: str
    points: tuple[Point, ...]
    inference: float
    """Forward FLOPs of a token in decoding, at the depth of the last evaluation."""
    parameters: int | None
    depth: float | None = None
    """Mean passes of a held-out token, where tokens halt."""
    by_depth: Mapping[int, float] = field(default_factory=dict)
    """Held-out loss of the tokens of each depth; where none halts, loss read out after each pass."""
    sets: Mapping[str, float] = field(default_factory=dict)
    """Last held-out loss of each named set, where there are several."""
    whole: float | None = None
    """Loss over more held-out text than the evaluations in training read, where it was measured."""
    whole_sets: Mapping[str, float] = field(default_factory=dict)
    """That of each of its datasets, where there are several."""
    text: str = ""
    """Which text that is, where runs may differ in it."""
    data: Mapping[str, str] = field(default_factory=dict)
    """What identifies the content of each dataset that the run read, by its path; empty where nothing says it."""
    tokenizer: str | None = None
    """Fingerprint of the training data's; None where nothing says it."""
    bits_per_byte: float | None = None
    sweep: tuple[Sweep, ...] = ()
    analysis: Mapping[str, Any] | None = None
    """What passes bring and who gets them (`inference.benefit`)."""
    config: RunConfig | None = None
    notes: tuple[str, ...] = ()

    @property
    def last(self) -> Point:
        """The last evaluation."""
        return self.points[-1]

    @property
    def loss(self) -> float:
        """The one to judge by."""
        return self.last.loss if self.whole is None else self.whole

    @property
    def named(self) -> Mapping[str, float]:
        """Parts of `loss` by the names of their texts."""
        return self.sets if self.whole is None else self.whole_sets

    def value(self, name: str) -> float | None:
        """One number by its name: of the run, of its last evaluation, or (`loss_NAME`) of a named text."""
        if name.startswith(PART):
            return self.named.get(name.removeprefix(PART))
        found: float | None = getattr(self, name) if hasattr(self, name) else getattr(self.last, name)
        return found


@dataclass(frozen=True)
class Group:
    """Runs that are one but for their seeds."""

    label: str
    results: tuple[Result, ...]

    @property
    def first(self) -> Result:
        """The run whose settings stand for all."""
        return self.results[0]

    def of(self, value: str) -> list[float]:
        """`Result.value` of each run; what is not known is left out."""
        return [v for v in (r.value(value) for r in self.results) if v is not None]

    def mean(self, value: str) -> float | None:
        """Mean over runs."""
        values = self.of(value)
        return statistics.fmean(values) if values else None

    def spread(self, value: str) -> float | None:
        """Standard deviation over runs; None for a single one."""
        values = self.of(value)
        return statistics.stdev(values) if len(values) > 1 else None

    def curve(self, x: str) -> list[tuple[float, float, float, float]]:
        """(x, mean loss, smallest, largest) where all runs were evaluated after as many tokens."""
        known = [{p.tokens: p for p in r.points} for r in self.results]
        rows = []
        for tokens in sorted(set.intersection(*(set(points) for points in known))):
            points = [k[tokens] for k in known]
            places = [v for v in (getattr(p, x) for p in points) if v is not None]
            if len(places) == len(points):
                losses = [p.loss for p in points]
                rows.append((statistics.fmean(places), statistics.fmean(losses), min(losses), max(losses)))
        return rows


def read_run(run: Path) -> Result:
    """A run folder's result; UserError for a folder without rows, evaluations or configuration."""
    series = jsonl.of_run(run)
    looks = [r for r in series.rows if "validation_loss" in r]
    if not looks:
        why = "train.eval_batches is 0, or it stopped before its first evaluation"
        raise UserError(f"{run} has no validation_loss in {jsonl.NAME}: {why}; leave it out, or train it further.")
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run / 'config.yaml'} is missing: a comparison needs the run's configuration.")
    cfg = load_saved_config(run)
    method = method_of(cfg)
    needed, executed = mean_needed(cfg, method), mean_executed(cfg, method)
    notes = tuple(f"{run}: {sentence}" for sentence in series.sentences())
    if any("needed_flops" not in r for r in looks):
        notes += (f"{run}: its rows do not tell FLOPs, so they are tokens times the plan's mean, as if none halted.",)
    points = tuple(
        Point(
            int(r["tokens"]), r["validation_loss"], r.get("needed_flops", needed * r["tokens"]),
            r.get("executed_flops", executed * r["tokens"]), r.get("training_seconds"),
        )
        for r in looks
    )  # fmt: skip
    last = looks[-1]
    active = _numbered(last, "ponder_valid_active_pass")
    end, total = series.rows[-1]["step"], series.rows[-1].get("total_steps")
    if total is not None and end < total:
        notes += (f"{run} is not finished: it is at step {end:,} of {total:,}.",)
    if not math.isfinite(points[-1].loss):
        notes += (f"{run} has diverged: its last held-out loss is {points[-1].loss}.",)
    valid = cfg.data.valid if isinstance(cfg.data.valid, dict) else {}
    sets = {name: last[key] for name in valid if (key := f"validation_loss_{name}") in last}
    told = _evaluation(run)
    if told.step not in (None, end):
        file = run / evaluation.NAME
        notes += (f"{file} is of step {told.step:,}, and the run at {end:,}: not used; run megaponder eval again.",)
        told = Evaluated()
    return Result(
        name=str(run),
        method=cfg.ponder.method,
        points=points,
        inference=inference_flops(cfg, method, [active[k] for k in sorted(active)]),
        parameters=model_parameters(cfg.model, own_parameters(method, cfg.model.num_layers or 0)).total,
        depth=last.get("ponder_valid_mean_depth"),
        by_depth=_numbered(last, "ponder_valid_loss_depth") or _by_pass(last),
        sets=sets if len(sets) > 1 else {},
        whole=told.loss,
        whole_sets=told.sets if len(told.sets) > 1 else {},
        text=told.text,
        **_datasets(run),
        bits_per_byte=told.bits_per_byte,
        sweep=told.sweep,
        analysis=told.analysis,
        config=cfg,
        notes=notes,
    )


def _datasets(run: Path) -> dict[str, Any]:
    """`Result.data` and `Result.tokenizer`, from the record of the data that the run read."""
    try:
        datasets = json.loads((run / same_data.NAME).read_text())["datasets"]
        known = {
            path: hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
            for path, identity in datasets.items()
        }
        return {"data": known, "tokenizer": next((d["tokenizer"] for d in datasets.values() if d["tokenizer"]), None)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _numbered(row: Mapping[str, Any], prefix: str) -> dict[int, float]:
    """Values of a series of names, by their numbers."""
    found = {n.removeprefix(prefix): v for n, v in row.items() if n.startswith(prefix)}
    return {int(n): v for n, v in sorted(found.items(), key=lambda item: item[0]) if n.isdecimal()}


def _by_pass(row: Mapping[str, Any]) -> dict[int, float]:
    """Loss read out after each pass, the last one among them."""
    earlier = _numbered(row, "ponder_valid_loss_pass")
    return {**{k + 1: loss for k, loss in earlier.items()}, len(earlier) + 1: row["validation_loss"]}


@dataclass(frozen=True)
class Evaluated:
    """What the file of `megaponder eval` tells."""

    loss: float | None = None
    """Of the model as it is, over held-out datasets."""
    sets: Mapping[str, float] = field(default_factory=dict)
    """Of each of them."""
    text: str = ""
    """Names of the datasets, their numbers of targets, and the length of windows."""
    step: int | None = None
    """Of the checkpoint; None where the file does not tell."""
    bits_per_byte: float | None = None
    sweep: tuple[Sweep, ...] = ()
    analysis: Mapping[str, Any] | None = None


def _evaluation(run: Path) -> Evaluated:
    path = run / evaluation.NAME
    if not path.is_file():
        return Evaluated()
    try:
        return evaluated(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{path} is not what `megaponder eval --json` writes ({error}).") from None


def evaluated(told: Mapping[str, Any]) -> Evaluated:
    """From the content of the file; KeyError, TypeError or IndexError for anything else."""
    results, swept = told["results"], told.get("sweep", [])
    whole = results[0]["together"]
    if not swept and len(results) > 1:
        swept = [{"variant": r["variant"], **r["together"]} for r in results]
    points = tuple(Sweep(s["variant"], s.get("kind") or kind(s["variant"]), s["flops_per_token"], s["loss"])
                   for s in swept)  # fmt: skip
    if analysis := told.get("analysis"):
        _ = analysis["losses"], analysis["decisions"], analysis["classes"]
    text = ", ".join(f"{name} ({values['targets']:,} targets)" for name, values in results[0]["data"].items())
    if told.get("length"):
        text += f", in windows of {told['length']:,} tokens"
    sets = {name: values["loss"] for name, values in results[0]["data"].items()}
    return Evaluated(whole["loss"], sets, text, told.get("step"), whole["bits_per_byte"], points, analysis)


def kind(variant: str) -> str:
    """Of a point of a sweep that does not tell it."""
    first = variant.partition(",")[0]
    if first in ("", AS_TRAINED):
        return AS_TRAINED
    return OTHER_PASSES if "pass" in first else RANDOM if first == RANDOM else HALTING


def of_one_text(results: Sequence[Result]) -> tuple[list[Result], list[str]]:
    """The results with losses of the same text, and what is to be said about that.

    The losses of `megaponder eval` are used if every run has one and all are of the same datasets; else those of
    training.
    """
    texts = {r.text if r.whole is not None else None for r in results}
    if texts == {None}:
        return list(results), _looks(results)
    if len(texts) == 1:
        return list(results), [f"Losses in the tables are of {text}." for text in texts if text]
    plain = [replace(r, whole=None, bits_per_byte=None) for r in results]
    without = [r.name for r in results if r.whole is None]
    why = f"{', '.join(without)} {'has' if len(without) == 1 else 'have'} none" if without else "their texts differ"
    return plain, [f"What megaponder eval found of whole texts is not in the tables, since {why}."]


def _looks(results: Sequence[Result]) -> list[str]:
    """How much text the last evaluation of training read, where that is the same for all."""
    counts = {(c.train.eval_batches * c.train.global_batch, c.data.sequence_length, isinstance(c.data.valid, dict))
              for c in (r.config for r in results) if c is not None}  # fmt: skip
    if len(counts) != 1:
        return []
    ((sequences, length, sets),) = counts
    of_each = " of each set" if sets else ""
    return [
        f"Losses in the tables are of the last evaluation in training, {sequences:,} sequences of {length:,} tokens"
        f"{of_each} (train.eval_batches); megaponder eval RUN --depth reads the whole text."
    ]


def grouped(results: Sequence[Result], labels: Mapping[str, str]) -> list[Group]:
    """Groups in the order of their first runs; `labels` by the name of a run."""
    made: dict[str, list[Result]] = {}
    for result in results:
        made.setdefault(labels[result.name], []).append(result)
    return [Group(label, tuple(members)) for label, members in made.items()]


def notes_of(groups: Sequence[Group]) -> list[str]:
    """What has to be said of the groups' runs."""
    said: list[str] = []
    results = [r for g in groups for r in g.results]
    without = [r.name for r in results if not r.sweep]
    if 0 < len(without) < len(results):
        said.append(
            f"{', '.join(without)}: not measured at other depths, so not among the best at equal FLOPs of inference, "
            "and the figure over them shows no other depths; megaponder eval RUN --depth measures them."
        )
    if any(len(g.results) > 1 for g in groups):
        said.append("After ±: the standard deviation over runs. Bands and bars in the figure: from the least to the "
                    "greatest of them.")  # fmt: skip
    if any("policy" in (r.analysis or {}) for g in groups if len(g.results) == 1 for r in g.results):
        said.append("Around numbers of one run: a standard error over windows of text.")
    for group in groups:
        said += _same_seed(group)
        for result in group.results:
            said += result.notes
        if len(group.results) > 1 and len({p.tokens for r in group.results for p in [r.last]}) > 1:
            ends = ", ".join(f"{r.last.tokens:,}" for r in group.results)
            said.append(f"The runs of {group.label} end after different numbers of tokens: {ends}.")
    return said


def _same_seed(group: Group) -> list[str]:
    """A sentence for runs of a group that repeat each other."""
    by_seed: dict[tuple[int, int | None], list[str]] = {}
    for r in group.results:
        if r.config is not None:
            by_seed.setdefault((r.config.train.seed, r.config.data.shuffle_seed), []).append(r.name)
    return [
        f"{', '.join(names)} have the same seed, {seed}: the spread of {group.label} is too small."
        for (seed, _), names in by_seed.items()
        if len(names) > 1
    ]
