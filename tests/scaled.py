"""Any configuration file, small enough for a test: sizes shrink, choices stay.

What stays: method and options, family and its settings, precision, optimizer, schedule, loss mask, data-parallel
options, recompute.  What shrinks: layers, widths, vocabulary, sequence, batch, budget; the layout becomes one process.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from megaponder.config.load import load_config
from megaponder.config.resolve import resolve
from megaponder.config.schema import RunConfig

LENGTH = 16
VOCAB = 96
EOD = 0
STEPS = 2


def scaled(path: Path, run: Path, dataset: str) -> RunConfig:
    """The file's run for two steps on a dataset of ids below VOCAB - 1, with width 32 and as few layers as the
    method needs."""
    cfg = copy.deepcopy(resolve(load_config(path, [])))
    small: dict[str, dict[str, Any]] = {
        # heads of 8 channels: a quarter of them is still an even number
        "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 4, "head_size": 8,
                  "vocab_size": VOCAB, "ffn_size": 64, "vocab_multiple": 32, "max_positions": LENGTH, "preset": None},
        "data": {"sequence_length": LENGTH, "train": [dataset], "valid": [], "split": "8,2,0", "eod_id": EOD,
                 "tokenizer": None, "cache": None},
        "parallel": {"tensor": 1, "pipeline": 1, "sequence": False, "experts": 1},
        "train": {"steps": STEPS, "tokens": None, "global_batch": 4, "micro_batch": 4, "eval_batches": 1,
                  "batch_rampup": None},
        "checkpoint": {"load": None, "load_changes": []},
        "logging": {"every": 1, "tensorboard": False},
    }  # fmt: skip
    for section, fields in small.items():
        for name, value in fields.items():
            setattr(getattr(cfg, section), name, value)
    if cfg.model.freqkv:
        cfg.model.freqkv = {**cfg.model.freqkv, "capacity": 7, "sink": 2}
    if cfg.model.moe:
        cfg.model.moe = {**cfg.model.moe, "experts": 4, "top_k": 2}
    if "pause_token_id" in cfg.ponder.options:
        cfg.ponder.options["pause_token_id"] = VOCAB - 1
    ends = [part for part in ("prelude", "coda") if part in cfg.ponder.options]
    if ends:  # one layer each, and one that is repeated
        cfg.ponder.options |= dict.fromkeys(ends, 1)
        cfg.model.num_layers = len(ends) + 1
    cfg.run = str(run)
    return cfg
