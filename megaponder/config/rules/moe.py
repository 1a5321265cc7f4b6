"""Rules on mixtures of experts: what the options may be, and which backbones, methods and layouts they fit."""

from __future__ import annotations

import math
from typing import Any

from megaponder.config.disciplines import OPTIONS as DISCIPLINE_OPTIONS
from megaponder.config.rules.case import (
    Case,
    Rule,
    nearest_divisor,
    nearest_multiple,
    require,
    require_number,
    require_option,
)
from megaponder.decoding.moe_options import OPTIONS, read

FIELD = "model.moe"


def moe_is_whole(c: Case) -> None:
    """Each option of a mixture is known and legal."""
    given = c.cfg.model.moe or {}
    for name, value in given.items():
        require_option(FIELD, name, value, OPTIONS)
    if not given:
        return
    for name, of in (("experts", "the number of experts of a layer"), ("top_k", "the experts that a row takes")):
        require(name in given, FIELD, given, f"it needs {name}, {of}", f"add {name}: {8 if name == 'experts' else 2}")
    for name, least in (("experts", 2), ("top_k", 1), ("shared_ffn", 0)):
        value = given.get(name, least)
        rule = f"it must be a whole number of at least {least}"
        require_number(type(value) is int and value >= least, f"{FIELD}.{name}", value, rule, f"use {least}")
    for name in ("scale", "aux_weight", "bias_rate"):
        value = given.get(name, 1.0)
        low = "more than 0" if name == "scale" else "at least 0"
        legal = type(value) in (int, float) and 0 <= value < math.inf and (value > 0 or name != "scale")
        require_number(legal, f"{FIELD}.{name}", value, f"it must be a number of {low}", "use 1.0")
    for name, words in (("score", ("softmax", "sigmoid")), ("renormalise", (True, False))):
        value = given.get(name, words[0])
        legal = any(value is word or (value == word and isinstance(word, str)) for word in words)
        rule = f"it must be {' or '.join(str(w).lower() for w in words)}"
        require(legal, f"{FIELD}.{name}", value, rule, f"use {str(words[0]).lower()}")
    routers = given.get("routers", "shared")
    legal = routers in ("shared", "per_pass") or (type(routers) is int and routers > 1)
    rule = "it must be shared, per_pass, or a whole number of at least 2"
    require(legal, f"{FIELD}.routers", routers, rule, "use shared")


def moe_scores_fit(c: Case) -> None:
    """The router has a gradient, and megatron-core has the rule."""
    o = read(c.cfg.model.moe)
    if o is None:
        return
    require(o.top_k <= o.experts, f"{FIELD}.top_k", o.top_k, f"there are {o.experts} experts", f"use {o.experts}")
    rule = "of one chosen expert the renormalised weight is always 1, so that the router would have no gradient"
    require(not (o.top_k == 1 and o.renormalise), f"{FIELD}.renormalise", True, rule, "use false")
    rule = "megatron-core renormalises sigmoid scores of several experts"
    wrong = o.score == "sigmoid" and o.top_k > 1 and not o.renormalise
    require(not wrong, f"{FIELD}.renormalise", False, rule, "use true, or score: softmax")
    rule = "biases are added to sigmoid scores only"
    require(
        not o.bias_rate or o.score == "sigmoid", f"{FIELD}.bias_rate", o.bias_rate, rule, "use 0.0 or score: sigmoid"
    )


def routers_have_passes(c: Case) -> None:
    """Each router has a pass of its own (or a slot), in which all layers run."""
    o, steps = read(c.cfg.model.moe), c.facts.steps
    if o is None or o.routers == "shared":
        return
    name, method = f"{FIELD}.routers", c.cfg.ponder.method
    rule = f"{method} repeats some of the layers only, and no router of a pass would serve the others"
    require(c.facts.core is None, name, o.routers, rule, "use shared")
    rule = f"with {method} a token runs {steps} pass{'' if steps == 1 else 'es (or slots)'}"
    fits = type(o.routers) is int and o.routers <= steps
    require(fits, name, o.routers, rule, f"use {steps}" if steps > 1 else "use shared")


def moe_fits_backbone(c: Case) -> None:
    """Experts are SwiGLU MLPs without biases."""
    m = c.cfg.model
    if not m.moe:
        return
    rule = "with model.moe the experts are SwiGLU MLPs"
    require(m.activation == "swiglu", "model.activation", m.activation, rule, "use swiglu, or model.moe: {}")
    rule = "with model.moe the experts have no biases"
    require(not m.mlp_bias, "model.mlp_bias", m.mlp_bias, rule, "use false, or model.moe: {}")


def disciplines_have_experts(c: Case) -> None:
    """Every discipline has top_k experts of its own, and datasets that are trained on."""
    given, name = c.cfg.train.disciplines, "train.disciplines"
    for option, value in given.items():
        require_option(name, option, value, DISCIPLINE_OPTIONS)
    if not given:
        return
    o = read(c.cfg.model.moe)
    require(o is not None, name, given, "there are no experts without model.moe", "use {}, or set model.moe")
    weight, data = given.get("weight", 0.01), given.get("data")
    legal = type(weight) in (int, float) and 0 <= weight < math.inf
    require_number(legal, f"{name}.weight", weight, "it must be a number of at least 0", "use 0.01")
    legal = isinstance(data, dict) and all(
        isinstance(paths, list) and all(isinstance(path, str) for path in paths) for paths in data.values()
    )
    rule = "it must name the datasets of each discipline"
    require(legal and bool(data), f"{name}.data", data, rule, "for example {math: [data/math]}")
    assert o is not None and isinstance(data, dict)
    rule = f"with model.moe.top_k = {o.top_k} experts each, those named have {len(data) * o.top_k} of the {o.experts}"
    fix = f"name {o.experts // o.top_k} of them, in the order of their experts (an empty list: no dataset)"
    require(len(data) * o.top_k == o.experts, f"{name}.data", list(data), rule, fix)
    there = [_prefix(item) for item in c.cfg.data.train if isinstance(item, str)]
    seen: dict[str, str] = {}
    for discipline, paths in data.items():
        for path in map(_prefix, paths):
            rule, fix = "data.train does not have this dataset", f"write it as there: {', '.join(there)}"
            require(not c.needs_data or path in there, f"{name}.data.{discipline}", path, rule, fix)
            rule = f"it is a dataset of {seen.get(path)}, too"
            require(path not in seen, f"{name}.data.{discipline}", path, rule, "name each dataset once")
            seen[path] = discipline


def _prefix(path: str) -> str:
    return path.removesuffix(".bin").removesuffix(".idx")


def moe_fits_training(c: Case) -> None:
    """What is not built for experts is refused."""
    cfg = c.cfg
    if not cfg.model.moe:
        return
    rule = "FP8 of experts, whose numbers of rows would have to be padded, is not built"
    require(cfg.precision.fp8 == "none", "precision.fp8", cfg.precision.fp8, rule, "use none, or model.moe: {}")
    rule = "Muon is not built for the matrices of experts"
    require(cfg.optimizer.kind != "muon", "optimizer.kind", "muon", rule, "use adamw, or model.moe: {}")
    rule = "with model.moe the number of rows of an expert is known only when it is routed, and a captured pass has one"
    require(cfg.precision.cuda_graphs is not True, "precision.cuda_graphs", True, rule, "use auto or false")
    tensor, sequence = cfg.parallel.tensor, cfg.parallel.sequence
    rule = "with model.moe each tensor rank routes a part of the rows, and without it these may not divide"
    wrong = cfg.ponder.skip_halted and tensor > 1 and not sequence
    require(not wrong, "parallel.sequence", False, rule, "use true, or ponder.skip_halted: false")
    cpu = c.machine is not None and c.machine.device == "cpu"
    rule = "gloo gathers equal numbers of rows only, and those of ranks differ once halted tokens are skipped"
    wrong = cpu and cfg.ponder.skip_halted and cfg.parallel.expert_ranks > 1 and cfg.parallel.experts > 1
    require(not wrong, "parallel.expert_tensor", cfg.parallel.expert_ranks, rule, "use 1 on CPUs")


def experts_fill_ranks(c: Case) -> None:
    """Every rank holds an equal number of experts, or of parts of them, and of the rows that it routes."""
    p, m = c.cfg.parallel, c.cfg.model
    o, split = read(m.moe), p.expert_ranks
    if o is None:
        fix = "leave it out, or set model.moe"
        require(p.experts == 1, "parallel.experts", p.experts, "there are no experts without model.moe", fix)
        ok = p.expert_tensor is None
        require(ok, "parallel.expert_tensor", p.expert_tensor, "there are no experts without model.moe", fix)
        return
    _divides("parallel.experts", p.experts, f"{FIELD}.experts", o.experts)
    name = "parallel.tensor" if p.expert_tensor is None else "parallel.expert_tensor"
    _divides(name, split, "model.ffn_size", m.ffn_size or 1)
    if o.shared_ffn:
        _divides("parallel.tensor", p.tensor, f"{FIELD}.shared_ffn", o.shared_ffn)
    rule = f"without parallel.experts it must be parallel.tensor = {p.tensor}, over which gradients are summed"
    require(split == p.tensor or p.experts > 1, "parallel.expert_tensor", split, rule, "leave it out")
    ranks = c.world_size // p.pipeline
    each, all_of_them = (f"{n} rank{'' if n == 1 else 's'}" for n in (split, ranks))
    rule = f"with {each} for each expert, it must divide the {all_of_them} of a stage"
    near = nearest_divisor(p.experts, max(1, ranks // split), o.experts)
    require(ranks % (p.experts * split) == 0, "parallel.experts", p.experts, rule, f"the nearest is {near}")
    length, unit = c.cfg.data.sequence_length, p.tensor * p.context
    rule = f"with model.moe it must be a multiple of {unit}, so that tensor ranks route equal parts of it"
    require(
        length % unit == 0, "data.sequence_length", length, rule, f"the nearest is {nearest_multiple(length, unit)}"
    )


def _divides(field: str, value: int, of: str, number: Any) -> None:
    rule = f"it must divide {of} = {number}"
    require(number % value == 0, field, value, rule, f"the nearest is {nearest_divisor(value, number)}")


RULES: tuple[Rule, ...] = (
    moe_is_whole,
    moe_scores_fit,
    moe_fits_backbone,
    moe_fits_training,
    disciplines_have_experts,
)
"""Of the model; `routers_have_passes` belongs to what is trained: an evaluation may run fewer passes."""
