"""From a Hugging Face folder's config.json to the configuration of the run that it becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaponder.config.load import from_mapping
from megaponder.config.resolve import resolve
from megaponder.config.schema import DataConfig, PonderConfig, RunConfig
from megaponder.errors import ConfigError, UserError
from megaponder.export.configs import PONDER_FIELDS
from megaponder.export.folder import has_tokenizer
from megaponder.export.hf_fields import model_config
from megaponder.ponder.settings import check_shape

MUST = {"family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size"}
"""Fields of the model section that every folder with a modelling file has."""


def run_config(hf: dict[str, Any], source: Path, out: Path, ignore: frozenset[str]) -> RunConfig:
    """The resolved configuration of an import; UserError if it does not describe a valid model."""
    where = str(source / "config.json")
    try:
        cfg = _run_config(hf, source, out, ignore, where)
        check_shape(cfg)
    except ConfigError as error:
        raise UserError(f"{where}: {error}") from None
    return cfg


def _run_config(hf: dict[str, Any], source: Path, out: Path, ignore: frozenset[str], where: str) -> RunConfig:
    ponder = PonderConfig()
    if hf.get("model_type") == "megaponder":
        model_fields = {ours: hf[theirs] for ours, theirs in PONDER_FIELDS.items() if theirs in hf}
        # an older version's folder has only its family's features, which the family fills in
        if lacking := sorted({t for ours, t in PONDER_FIELDS.items() if ours in MUST} - hf.keys()):
            raise UserError(f"{where}: {lacking[0]} is missing.")
        method = {"method": hf["method"], "options": hf["method_options"]}
        whole = from_mapping({"model": {**model_fields, "embedding_scale": hf["embedding_scale"]}, "ponder": method})
        section, ponder = whole.model, whole.ponder
    else:
        section = model_config(hf, where, ignore)
    eos = hf.get("eos_token_id")
    data = DataConfig(
        sequence_length=int(section.max_positions or 0),
        eod_id=eos if type(eos) is int and 0 <= eos < int(section.vocab_size or 0) else None,
        tokenizer=str(source) if has_tokenizer(source) else None,
    )
    return resolve(RunConfig(run=str(out), model=section, ponder=ponder, data=data))
