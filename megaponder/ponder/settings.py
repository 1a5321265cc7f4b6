"""Values that the config leaves to the method (`auto`)."""

from __future__ import annotations

import math
from dataclasses import fields, replace

from megaponder.config import rules
from megaponder.config.resolve import init_std
from megaponder.config.rules import Case
from megaponder.config.rules.ranges import numbers_are_in_range
from megaponder.config.schema import ModelConfig, PonderConfig, RunConfig
from megaponder.errors import UserError
from megaponder.ponder.base import Method, Shape
from megaponder.ponder.facts import facts_of
from megaponder.ponder.plugins import is_loaded, load_plugin
from megaponder.ponder.registry import build_method, changed_defaults, methods


def method_of(cfg: RunConfig) -> Method:
    """The method of a resolved config.

    A plugin named in the config is not run here, since the config may come from a checkpoint: see `use_plugin`.
    """
    m = cfg.model
    assert m.family is not None and m.num_layers is not None and m.hidden_size is not None, "the config is not resolved"
    if cfg.ponder.plugin and cfg.ponder.method not in methods() and not is_loaded(cfg.ponder.plugin):
        raise UserError(
            f"ponder.method = {cfg.ponder.method!r}: it comes from the plugin {cfg.ponder.plugin}, whose code is run "
            "only if you name it yourself, with --plugin PATH."
        )
    heads = m.num_kv_heads or 0, m.head_size or 0
    shape = Shape(m.family, m.num_layers, m.hidden_size, *heads, m.vocab_size or 0)
    return build_method(cfg.ponder.method, cfg.ponder.options, shape)


def use_plugin(ponder: PonderConfig) -> None:
    """Run the plugin of a configuration that is the user's own, not one that came with a checkpoint."""
    if ponder.plugin is not None:
        load_plugin(ponder.plugin)


def as_a_run_meant_it(ponder: PonderConfig) -> PonderConfig:
    """The section of a file that a run wrote: what it does not state had the default of the version that wrote it."""
    earlier = changed_defaults(ponder.method)
    return replace(ponder, options={**ponder.options, **{k: v for k, v in earlier.items() if k not in ponder.options}})


def with_stated_options(cfg: RunConfig, before: PonderConfig | None = None) -> RunConfig:
    """A copy that means the same where defaults are others: it states the options whose default has changed.

    `before`: of the run that goes on, or whose weights are loaded; what is not said otherwise stays as it was there.
    """
    options = dict(cfg.ponder.options)
    missing = changed_defaults(cfg.ponder.method).keys() - options.keys()
    if missing and before is not None and before.method == cfg.ponder.method:
        options |= {name: before.options[name] for name in missing & before.options.keys()}
        missing -= options.keys()
    if missing:
        now = method_of(cfg).options
        options |= {name: getattr(now, name) for name in sorted(missing)}
    return replace(cfg, ponder=replace(cfg.ponder, options=options))


def with_routers(cfg: RunConfig, method: Method) -> RunConfig:
    """A copy in which `model.moe.routers: per_pass` is a number: that of a token's steps in evaluation.

    What has no such number stays, and a rule refuses it.  The number is what checkpoints and exports know: with more
    passes than that, later ones take the last router.
    """
    if (cfg.model.moe or {}).get("routers") != "per_pass":
        return cfg
    plan = method.passes(cfg.train.seed, None)
    steps = 1 + max(step for p in plan for step in p.steps)
    if steps == 1 or method.core is not None:
        return cfg
    return replace(cfg, model=replace(cfg.model, moe={**(cfg.model.moe or {}), "routers": steps}))


def table_rows(cfg: RunConfig) -> dict[str, int]:
    """Rows of the token table that are the method's own parameters, by the parameter's name (`base.token_row`)."""
    options = method_of(cfg).options
    kind = "parameter"
    return {f.metadata[kind]: getattr(options, f.name) for f in fields(options) if kind in f.metadata}


def embedding_scale(model: ModelConfig, method: Method) -> float:
    """Factor c on every token embedding that is looked up, and on the table of vocabulary mixtures."""
    value, h = model.embedding_scale, model.hidden_size
    assert h is not None
    if value == "auto":
        return method.embedding_scale()
    named = {"none": 1.0, "sqrt_h": math.sqrt(h), "sqrt_2.5h": math.sqrt(2.5 * h)}
    return named[value] if isinstance(value, str) else float(value)


def initialisation(model: ModelConfig, method: Method) -> tuple[str, float, float]:
    """(kind, std of matrices and embeddings, factor on the std of attention-output and MLP-down matrices)."""
    kind, factor = method.initialisation()
    if model.init != "auto":
        kind = model.init
    if model.init_output_scale != "auto":
        factor = float(model.init_output_scale)
    return kind, init_std(model, kind), factor


def check_shape(cfg: RunConfig) -> None:
    """ConfigError for a resolved configuration that does not describe a valid model, wherever it came from."""
    case = Case(cfg, facts_of(method_of(cfg), cfg.train.seed), 1)
    numbers_are_in_range(case, ("model.", "data."))
    for rule in rules.model.RULES:
        rule(case)
