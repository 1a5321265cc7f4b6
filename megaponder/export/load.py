"""Models in memory: from an export folder, or straight from a checkpoint's weights."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaponder.config.schema import RunConfig
from megaponder.errors import UserError, first_line
from megaponder.export import configs, folder, names

if TYPE_CHECKING:
    from megaponder.export.modeling_megaponder import MegaponderForCausalLM


def load_folder(path: Path, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Any:
    """The model of an export folder, in evaluation mode; weights from safetensors only.

    A folder with its own modelling file is loaded through that very file, without transformers' cache of remote code.
    Where it is not the one of this installation, its code is run only if that is asked for.  UserError for a folder
    that makes no model, or one whose weights are not finite.
    """
    try:
        model, notes = _load(path, dtype, trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # whatever transformers and the modelling file make of wrong fields
        first = first_line(error).rstrip(".")
        raise UserError(f"{path}: no model can be made of it ({type(error).__name__}: {first}).") from error
    wrong = [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in notes[kind]]
    if wrong:
        name = wrong[0] if isinstance(wrong[0], str) else wrong[0][0]
        raise UserError(f"{path}: the weights do not fit the configuration ({name}).")
    if not isinstance(scale := getattr(model.config, "embedding_scale", 1.0), int | float):
        raise UserError(f"{path}: no model can be made of it (embedding_scale = {scale!r} is no number).")
    if bad := next((name for name, p in model.named_parameters() if not p.isfinite().all()), None):
        raise UserError(f"{path}: {bad} has values that are not finite.")
    return model.eval()


def _load(path: Path, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    config = folder.read_json(path / "config.json")
    cls: Any = AutoModelForCausalLM
    if "auto_map" in config:
        file, _, name = config["auto_map"]["AutoModelForCausalLM"].partition(".")
        cls = getattr(_module(path / f"{Path(file).name}.py", trust_remote_code), name)
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # its table of what does not fit comes back in the notes, to be said in a sentence
    try:
        return cls.from_pretrained(
            path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, use_safetensors=True
        )
    finally:
        logging.set_verbosity(before)


def _module(source: Path, trust_remote_code: bool) -> Any:
    if not source.is_file():
        raise UserError(f"{source} is missing.")
    if not trust_remote_code and source.read_bytes() != configs.SOURCE.read_bytes():
        raise UserError(
            f"{source} is not the modelling file of this version, and loading the model runs it; read it, then say "
            "--trust-remote-code."
        )
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
