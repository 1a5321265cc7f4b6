"""In what compared runs differ besides their method: each of these may explain a result as well as the method does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megaponder.compare.results import Group, Result
from megaponder.config.fields import all_fields, value_of
from megaponder.config.schema import RunConfig
from megaponder.ponder.settings import embedding_scale, initialisation, method_of

SEEDS = ("train.seed",)
"""What may differ within a group."""
LONGEST = 60
"""Characters of a label that tells settings; beyond, it tells the run's folder."""
SECTIONS_LEFT_OUT = ("ponder", "parallel", "checkpoint", "faults", "logging")
"""The method itself, and what changes no number."""


def settings(cfg: RunConfig, texts: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """All settings of a resolved configuration that a comparison must match, by name.

    A field declares if it is left out, as those are that name places, and those that others settle (`_settled`).
    Datasets have the names that `texts` gives their paths.
    """
    fields = {
        name: value_of(cfg, name)
        for name, field in all_fields().items()
        if field.declared.compared and name.partition(".")[0] not in SECTIONS_LEFT_OUT
    }
    for name in ("data.train", "data.valid"):
        fields[name] = _renamed(fields[name], texts)
    if cfg.data.valid:  # nothing is split then
        del fields["data.split"]
    return fields | _settled(cfg)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _renamed(part, names) for name, part in value.items()}
    return [names.get(v, v) if isinstance(v, str) else v for v in value]


def _texts(results: Sequence[Result]) -> dict[str, dict[str, str]]:
    """By run, what each dataset is called: one content has one name, wherever a run found it; another content of the
    same path has its identity in its name."""
    called: dict[str, str] = {}
    for result in results:
        for path, content in result.data.items():
            if content not in called:
                called[content] = f"{path} ({content[:8]})" if path in called.values() else path
    return {r.name: {path: called[content] for path, content in r.data.items()} for r in results}


def _settled(cfg: RunConfig) -> dict[str, Any]:
    """What the method settles where the configuration says `auto`."""
    method = method_of(cfg)
    family, std, factor = initialisation(cfg.model, method)
    drawn = f"{family}, std {std:.4g}, output projections x {factor:.4g}"
    return {
        "embedding scale": round(embedding_scale(cfg.model, method), 6),
        "initialisation": f"the weights of {cfg.checkpoint.load}" if cfg.checkpoint.load else drawn,
    }


def labels(results: Sequence[Result]) -> dict[str, str]:
    """A short label of each run: its method, and what of its options and settings tells it from others, never its seed;
    where that is long, its folder (of runs that differ in their seed, the first one's)."""
    texts = _texts(results)
    known = {r.name: _identity(r, texts[r.name]) for r in results}
    labels: dict[str, str] = {}
    made: dict[str, str] = {}
    for result in results:
        one = repr((result.method, sorted(known[result.name].items())))
        if one not in made:
            same = [r for r in results if r.method == result.method]
            words = [
                f"{name.rpartition('.')[2]} {_short(known[result.name].get(name))}"
                for name in sorted({n for r in same for n in known[r.name]})
                if len({repr(known[r.name].get(name)) for r in same}) > 1
            ]
            label = ", ".join([result.method, *words])
            taken = label in made.values()  # settings that differ in digits which are not shown
            made[one] = f"{result.method}: {result.name}" if taken or len(label) > LONGEST else label
        labels[result.name] = made[one]
    return labels


def _identity(result: Result, texts: Mapping[str, str]) -> dict[str, Any]:
    """Settings and options but the seeds."""
    assert result.config is not None
    own = {n: v for n, v in settings(result.config, texts).items() if n not in SEEDS and n != "data.shuffle_seed"}
    return own | {f"ponder.{name}": value for name, value in vars(method_of(result.config).options).items()}


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_short(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_short, value)) or "none"
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def warnings(groups: Sequence[Group]) -> list[str]:
    """A sentence for each setting besides the method in which the groups differ."""
    texts = _texts([r for g in groups for r in g.results])
    known = {g.label: settings(g.first.config, texts[g.first.name]) for g in groups if g.first.config is not None}
    said = []
    for name in sorted({n for values in known.values() for n in values if n not in SEEDS}):
        by_value: dict[str, list[str]] = {}
        for label, values in known.items():
            by_value.setdefault(_short(values.get(name)), []).append(label)
        if len(by_value) > 1 and not (name == "data.shuffle_seed" and _follows_seed(groups)):
            said.append(_sentence(name, by_value))
    return _tokenizers(groups) + said


def _tokenizers(groups: Sequence[Group]) -> list[str]:
    """What makes losses per token incomparable."""
    by_value: dict[str, list[str]] = {}
    for group in groups:
        for tokenizer in dict.fromkeys(r.tokenizer for r in group.results if r.tokenizer):
            by_value.setdefault(tokenizer[:8], []).append(group.label)
    if len(by_value) < 2:
        return []
    return [
        f"{_sentence('tokenizer', by_value)[:-1]}. Losses per token cannot be compared then: compare bits per byte of "
        "the same text, which megaponder eval prints."
    ]


def _follows_seed(groups: Sequence[Group]) -> bool:
    """Whether every run's order of text comes from its own seed, so that groups differ in it as their seeds do."""
    configs = [r.config for g in groups for r in g.results if r.config is not None]
    seeds = [sorted(r.config.train.seed for r in g.results if r.config is not None) for g in groups]
    return all(c.data.shuffle_seed == c.train.seed for c in configs) and all(s == seeds[0] for s in seeds)


def _sentence(name: str, by_value: Mapping[str, Sequence[str]]) -> str:
    parts = [f"{value} ({', '.join(map(_quoted, members))})" for value, members in by_value.items()]
    return f"{name} differs: {'; '.join(parts)}."


def _quoted(label: str) -> str:
    """In quotation marks, where a comma within it could pass for one after it."""
    return f'"{label}"' if "," in label else label
