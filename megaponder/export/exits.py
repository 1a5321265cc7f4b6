"""A calibrated exit, written into an export folder: the threshold where decoding reads it, and what it promises."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megaponder import __version__
from megaponder.config.schema import RunConfig
from megaponder.errors import UserError
from megaponder.export import compose, configs, folder
from megaponder.export.to_hf import DTYPES

FIELD = "confident_exit"
"""In config.json: threshold, risk, confidence, the texts' checksum, and how they were found."""
BEGIN, END = "<!-- exit -->", "<!-- /exit -->"
STATE = "method.budget.state"


def refuse_foreign(path: Path) -> None:
    """UserError for a folder that is none of this system's pondering exports."""
    fields = folder.read_config(path)
    if fields.get("model_type") != "megaponder" or "auto_map" not in fields:
        raise UserError(
            f"{path}: an exit is written into exports with megaponder's own modelling code, and this is a folder of "
            f"model_type {fields.get('model_type')!r}; import it, export the run, and calibrate that."
        )


def dtype_of(path: Path) -> torch.dtype:
    """The format of the folder's weights."""
    fields = folder.read_config(path)
    return DTYPES.get(str(fields.get("dtype") or fields.get("torch_dtype")), torch.float32)


def write(path: Path, cfg: RunConfig, told: Mapping[str, Any], sentence: str, options: Mapping[str, Any]) -> None:
    """Replace the folder by one whose `cfg.ponder.method` exits so.

    `options`: of the method; without any, the threshold is that of the budget, a tensor.  Weights are linked, not
    copied, where the file system can.
    """
    fields, before = folder.read_config(path), {p.name: p for p in path.iterdir() if p.is_file()}
    replaced = {"config.json", "README.md"} & before.keys()
    code: dict[str, str] = {}
    if fields["method"] != cfg.ponder.method:  # a ponderlm becomes one that exits by confidence
        code = compose.files(cfg.ponder.method)
        replaced |= {p for p in before if p.endswith(".py")}
        fields |= {"method": cfg.ponder.method, **compose.decoding_class(cfg.ponder.method).config_fields}
        fields["method_options"] = configs.ponder_config(cfg, "", None)["method_options"]
    fields["method_options"] = {**fields["method_options"], **options}
    fields |= {FIELD: dict(told)} | ({"megaponder_version": __version__} if code else {})
    tensors = None
    if not options:
        tensors = folder.read_weights(path)
        tensors[STATE] = tensors[STATE].clone()
        tensors[STATE][0] = told["threshold"]
        replaced |= {p for p in before if p.startswith("model") and ".safetensors" in p}
    with folder.published(path, force=True) as temporary:
        for name in before.keys() - replaced:
            _link(before[name], temporary / name)
        for name, text in code.items():
            (temporary / name).write_bytes(text.encode())
        if tensors is not None:
            folder.write_weights(temporary, tensors)
        if "README.md" in before:
            card = _card(before["README.md"].read_text(encoding="utf-8"), sentence)
            (temporary / "README.md").write_text(card, encoding="utf-8")
        folder.write_json(temporary / "config.json", fields)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def _card(text: str, sentence: str) -> str:
    """The model card with this exit in place of an earlier one."""
    begin, _, rest = text.partition(BEGIN)
    rest = rest.partition(END)[2] if rest else ""
    return f"{begin.rstrip()}\n\n{BEGIN}\n{sentence}\n{END}\n{rest.lstrip()}"
