"""Models in memory: from an export folder, or straight from a checkpoint's weights."""

from __future__ import annotations

import hashlib
import importlib
import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaponder.config.schema import RunConfig
from megaponder.errors import UserError, first_line
from megaponder.export import code, configs, folder, names
from megaponder.ponder.registry import methods

if TYPE_CHECKING:
    from megaponder.export.modeling_megaponder import MegaponderForCausalLM


def load_folder(path: Path, dtype: torch.dtype = torch.float32, trust_remote_code: bool = False) -> Any:
    """The model of an export folder, in evaluation mode; weights from safetensors only.

    A folder with modelling code is loaded through that very code, without transformers' cache of remote code.  Where it
    is not this installation's, it is run only if that is asked for.  An earlier version's is replaced by the
    present one.  UserError for a folder that makes no model, or one whose weights are not finite.
    """
    try:
        model, notes = _load(path, dtype, trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # whatever transformers and the modelling code make of wrong fields
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
        texts = code.read(path, Path(file).name)
        if code.is_earlier(texts):
            from megaponder.export.modeling_megaponder import MegaponderForCausalLM

            cls = MegaponderForCausalLM
        else:
            _refuse_foreign(path, texts, str(config.get("method")), trust_remote_code)
            cls = getattr(_module(path, Path(file).name, texts), name)
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # its table of what does not fit comes back in the notes, to be said in a sentence
    try:
        return cls.from_pretrained(
            path, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, use_safetensors=True
        )
    finally:
        logging.set_verbosity(before)


class _Code(InspectLoader):
    """Imports the modelling files of an export folder from memory, as modules of one package."""

    def __init__(self, package: str, folder: Path, texts: dict[str, bytes]):
        self._package, self._folder = package, folder
        self._texts = {f"{package}.{name.removesuffix('.py')}": text for name, text in texts.items()}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._package and name not in self._texts:
            return None
        file = self._folder / f"{name.rpartition('.')[2]}.py"
        spec = ModuleSpec(name, self, origin=str(file), is_package=name == self._package)
        spec.has_location = name in self._texts
        return spec

    def is_package(self, name: str) -> bool:
        return name == self._package

    def get_source(self, name: str) -> str:
        return self._texts[name].decode("utf-8") if name in self._texts else ""


def _refuse_foreign(folder: Path, texts: dict[str, bytes], method: str, trust_remote_code: bool) -> None:
    if trust_remote_code:
        return
    if method not in methods():
        raise UserError(
            f"{folder}: no model can be made of it: method {method!r} is unknown here; if a plugin of yours has it, "
            "name that with --plugin."
        )
    if other := code.foreign(texts, method):
        raise UserError(
            f"{folder / other} is not a modelling file of this version, and loading the model runs it; read it, then "
            "say --trust-remote-code."
        )


def _module(folder: Path, entry: str, texts: dict[str, bytes]) -> Any:
    """The module `entry` of a folder, from the bytes that were compared with this version's."""
    package = f"megaponder_export_{hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]}"
    finder = _Code(package, folder, texts)
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(f"{package}.{entry}")
    finally:
        sys.meta_path.remove(finder)


def build_model(cfg: RunConfig, plain: names.Tensors, eos: int | None = None) -> MegaponderForCausalLM:
    """A checkpoint's model on the exports' class, in the tensors' format, without writing anything.

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
