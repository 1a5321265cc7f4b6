"""Models in memory: from an export folder, or straight from a checkpoint's weights."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaponder.config.schema import RunConfig
from megaponder.errors import UserError
from megaponder.export import configs, folder, names

if TYPE_CHECKING:
    from megaponder.export.modeling_megaponder import MegaponderForCausalLM


def load_folder(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of an export folder, in evaluation mode.

    A folder with its own modelling file is loaded through that very file, not through this installation's copy, and
    without transformers' cache of remote code.
    """
    from transformers import AutoModelForCausalLM

    config = folder.read_json(path / "config.json")
    cls: Any = AutoModelForCausalLM
    if "auto_map" in config:
        file, _, name = config["auto_map"]["AutoModelForCausalLM"].partition(".")
        cls = getattr(_module(path / f"{file}.py"), name)
    # sizes that differ come back in the notes, to be refused below in a sentence
    model, notes = cls.from_pretrained(path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True)
    wrong = [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in notes[kind]]
    if wrong:
        name = wrong[0] if isinstance(wrong[0], str) else wrong[0][0]
        raise UserError(f"{path}: the weights do not fit the configuration ({name}).")
    return model.eval()


def _module(source: Path) -> Any:
    if not source.is_file():
        raise UserError(f"{source} is missing.")
    name = f"megaponder_export_{abs(hash(source.resolve())):x}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up
    spec.loader.exec_module(module)
    return module


def build_model(cfg: RunConfig, plain: names.Tensors, eos: int | None = None) -> MegaponderForCausalLM:
    """A checkpoint's model on the modelling file's class, in the tensors' format, without writing anything.

    `plain` comes from `names.to_plain`; its tensors become the model's parameters.
    """
    from megaponder.export.modeling_megaponder import MegaponderConfig, MegaponderForCausalLM

    dtype = str(plain["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    fields = configs.ponder_config(cfg, dtype, eos)
    with torch.device("meta"):
        model = MegaponderForCausalLM(MegaponderConfig(**fields))
    tied = {"lm_head.weight": plain["model.embed_tokens.weight"]} if cfg.model.tie_embeddings else {}
    try:
        model.load_state_dict({**plain, **tied}, strict=True, assign=True)
    except RuntimeError as error:
        first = [line.strip() for line in str(error).splitlines()][1:2]
        raise UserError(f"The checkpoint's weights do not fit its configuration: {' '.join(first)}") from None
    model.tie_weights()
    return model.eval()
