"""From a Hugging Face folder's config.json to the configuration of the run that it becomes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaponder.config.load import from_mapping
from megaponder.config.resolve import resolve
from megaponder.config.schema import DataConfig, PonderConfig, RunConfig
from megaponder.errors import ConfigError, UserError
from megaponder.export import looped
from megaponder.export.configs import PONDER_FIELDS
from megaponder.export.folder import has_tokenizer
from megaponder.export.formats import FORMATS
from megaponder.export.hf_fields import model_config, refuse_bad_ids, refuse_ignored
from megaponder.export.public_code import pondering
from megaponder.ponder.settings import as_a_run_meant_it, check_shape

MUST = {"family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size"}
"""Fields of the model section that every folder with a modelling file has."""


def run_config(
    hf: dict[str, Any], source: Path, out: Path, ignore: frozenset[str], method: str | None = None
) -> RunConfig:
    """The resolved configuration of an import; UserError if it does not describe a valid model.

    `method` is what the user says of a folder of PonderLM-2's code (`public_code`).
    """
    where = str(source / "config.json")
    try:
        cfg = _run_config(dict(hf), source, out, ignore, where, method)
        check_shape(cfg)
    except ConfigError as error:
        raise UserError(f"{where}: {_in_their_words(str(error), hf)}") from None
    return cfg


def _in_their_words(sentence: str, hf: dict[str, Any]) -> str:
    """A sentence about the model section, with the names that the folder's config.json has for its fields."""
    kind = str(hf.get("model_type"))
    form = looped.KINDS.get(kind) or FORMATS.get(kind)
    names = (
        {ours: theirs for theirs, ours in form.taken.items()}
        if form
        else PONDER_FIELDS | {"embedding_scale": "embedding_scale"}
    )
    if form:
        names |= {code.ours[0]: theirs for theirs, code in form.coded.items() if len(code.ours) == 1}
        rope = next((name for name in ("rope_parameters", "rope_scaling") if hf.get(name)), "rope_scaling")
        names |= {"rotary_scaling": rope, "attention_window": "sliding_window"}
    return re.sub(r"\bmodel\.(\w+)", lambda found: names.get(found[1], found[0]), sentence)


def start_config(cfg: RunConfig, out: Path) -> RunConfig:
    """The run folder's own config.yaml: what a training that starts from an import needs beside data and a budget.

    End-of-document ids are those of the datasets, which know them.
    """
    return replace(
        cfg,
        data=replace(cfg.data, eod_id=None),
        checkpoint=replace(cfg.checkpoint, load=str(out)),
        run=f"{out}-trained",
    )


def _loss_mask(hf: dict[str, Any], public: bool) -> Any:
    """The rule that trained the model: others' vanilla models learned to end documents; here the default, which is that
    of the public pondering code, leaves these targets out."""
    ours = public or hf.get("model_type") == "megaponder" or "megaponder_version" in hf
    return DataConfig.loss_mask if ours else "plain"


def _run_config(
    hf: dict[str, Any], source: Path, out: Path, ignore: frozenset[str], where: str, method: str | None
) -> RunConfig:
    if not isinstance(hf.get("model_type", ""), str):
        raise UserError(f"{where}: model_type = {hf['model_type']!r}: it must be a string.")
    refuse_ignored(hf, ignore, where)
    refuse_bad_ids(hf, where)
    ponder, public = PonderConfig(), pondering(hf, method, where)
    mask = _loss_mask(hf, public is not None)
    if hf.get("model_type") == "megaponder":
        model_fields = {ours: hf[theirs] for ours, theirs in PONDER_FIELDS.items() if theirs in hf}
        # an older version's folder has only its family's features, which the family fills in
        if lacking := sorted({t for ours, t in PONDER_FIELDS.items() if ours in MUST} - hf.keys()):
            raise UserError(f"{where}: {lacking[0]} is missing.")
        said = {"method": hf["method"], "options": hf["method_options"]}
        whole = from_mapping({"model": {**model_fields, "embedding_scale": hf["embedding_scale"]}, "ponder": said})
        section, ponder = whole.model, as_a_run_meant_it(whole.ponder)
    elif hf.get("model_type") in looped.KINDS:
        section, ponder = looped.sections(hf, where)
    else:
        section = model_config(hf, where)
        if public is not None:
            section = replace(section, embedding_scale=public.embedding_scale)  # type: ignore[arg-type]
            ponder = PonderConfig(public.method, public.options)
    eos = hf.get("eos_token_id")
    if isinstance(eos, list) and eos:
        eos = eos[0]  # the others end turns of a chat
    data = DataConfig(
        sequence_length=int(section.max_positions or 0),
        loss_mask=mask,
        eod_id=eos if type(eos) is int and 0 <= eos < int(section.vocab_size or 0) else None,
        tokenizer=str(source) if has_tokenizer(source) else None,
    )
    return resolve(RunConfig(run=str(out), model=section, ponder=ponder, data=data))
