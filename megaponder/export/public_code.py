"""Folders that the public PonderLM and PonderLM-2 code saves: plain Llama, GPT-NeoX or GPT-2 tensors beside fields that
say how the model ponders.

PonderLM's config.json says all.  That of PonderLM-2 does not say which of its methods trained the model: loop, pause
and PonderLM-2 leave the same fields and tensors, so the user says it.
Sources: github.com/LUMIA-Group/PonderingLM and github.com/LUMIA-Group/PonderLM-2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megaponder.errors import UserError

FIELDS = {
    "PonderLM": (
        "ponderinglm", "pondering_steps", "mutiply_pondering_steps", "scale_embeds", "softmax_temperature",
        "recurrent_model", "checkpoint_num_layers",
    ),
    "PonderLM-2": (
        "num_latent_thoughts", "num_jacobi_iterations", "random_jacobi_iterations", "interpolation",
        "interpolation_use_topk", "interpolation_topk", "scale_embeds", "recurrent_model", "pause_token_id",
        "residual_interpolated_embeds", "hidden_layer_num", "high_memory_mode", "checkpoint_num_layers",
    ),
}  # fmt: skip
"""By kind; the first one tells the kind."""
METHODS = ("ponderlm2", "ponderlm", "loop", "pause", "vanilla")
"""What PonderLM-2's code can train, under the names here."""
UNUSED = re.compile(r"adapter\.weight")
"""Parameters of that code that nothing uses."""
PAUSE_TOKEN = 50288
"""The code's default."""


@dataclass(frozen=True)
class Pondering:
    """What the fields mean."""

    method: str
    options: dict[str, Any]
    embedding_scale: str
    """Of the model section."""


def kind_of(hf: dict[str, Any]) -> str | None:
    """The code that saved a config.json, or None."""
    return next((kind for kind, names in FIELDS.items() if names[0] in hf), None)


def ponders(hf: dict[str, Any]) -> bool:
    """Whether a folder of that code holds anything but a vanilla model."""
    kind = kind_of(hf)
    if kind == "PonderLM":
        return bool(hf["ponderinglm"])
    return kind is not None and bool(hf.get("recurrent_model") or hf["num_latent_thoughts"])


def pondering(hf: dict[str, Any], method: str | None, where: str) -> Pondering | None:
    """Method, options and embedding scale of a folder, whose fields are taken out of `hf`; None for other folders.

    `method` is the user's word, needed for PonderLM-2's code alone.  UserError if it is missing or not wanted, and for
    fields of which the code makes something that no method here computes.
    """
    kind = kind_of(hf)
    if kind != "PonderLM-2" and method is not None:
        raise UserError(f"{where}: --method {method}: this folder says itself how it ponders; leave the option out.")
    if kind is None:
        return None
    given = {name: hf.pop(name) for name in (*FIELDS[kind], "auto_map") if name in hf}  # its code is not run
    size = hf.get("vocab_size")
    vocabulary = size if type(size) is int else 0
    fields = _Fields(given, f"{where}: this is a pondering model of {kind}:", hf["model_type"], vocabulary)
    if fields.backbone not in ("llama", "gpt_neox", "gpt2")[: 3 if kind == "PonderLM" else 2]:
        raise UserError(f"{fields.where} its code has no model_type {fields.backbone!r}.")
    return _ponderlm(fields) if kind == "PonderLM" else _ponderlm2(fields, method)


@dataclass(frozen=True)
class _Fields:
    given: dict[str, Any]
    where: str
    backbone: str
    vocabulary: int

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.given.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise UserError(f"{self.where} {name} = {value!r}: it must be true or false.")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.given.get(name, default)
        if type(value) is not int:
            raise UserError(f"{self.where} {name} = {value!r}: it must be an integer.")
        return value

    def must_be(self, name: str, *legal: Any) -> None:
        value = self.given.get(name, legal[0])
        if value not in legal or (isinstance(value, bool) and value not in [x for x in legal if isinstance(x, bool)]):
            raise UserError(
                f"{self.where} {name} = {value!r} changes what it computes; only {legal[0]!r} is known here."
            )


def _ponderlm(fields: _Fields) -> Pondering:
    if not fields.flag("ponderinglm"):
        return Pondering("vanilla", {}, "none")
    fields.must_be("softmax_temperature", 1.0, None)
    if fields.backbone == "gpt2" and not fields.flag("recurrent_model"):
        raise UserError(
            f"{fields.where} its GPT-2 ponders only where recurrent_model is true, which it is not; set ponderinglm to "
            "false in a copy of config.json to import the vanilla model that the code then trained."
        )
    options = {"steps": fields.number("pondering_steps"), "multiply_by_steps": fields.flag("mutiply_pondering_steps")}
    return Pondering("ponderlm", options, "sqrt_h" if fields.flag("scale_embeds") else "none")


def _ponderlm2(fields: _Fields, method: str | None) -> Pondering:
    count, recurrent = fields.number("num_latent_thoughts"), fields.flag("recurrent_model")
    if method is None and not recurrent and count == 0:
        return Pondering("vanilla", {}, "none")
    if method not in METHODS:
        said = (
            f"--method {method} is not one of its methods" if method else "its config.json does not say by which method"
        )
        raise UserError(
            f"{fields.where} {said}; say what trained it, with megaponder import --method {', '.join(METHODS[:-1])} or "
            f"{METHODS[-1]}."
        )
    neox, scaled = fields.backbone == "gpt_neox", fields.flag("scale_embeds")
    if method == "vanilla":
        return Pondering("vanilla", {}, "none")
    if not recurrent and method != "pause" and not (neox and method == "ponderlm2"):
        raise UserError(f"{fields.where} without recurrent_model it does not run {method}; say --method vanilla.")
    fields.must_be("hidden_layer_num", None, 0)
    if method == "loop":
        return Pondering("loop", {"extra_passes": count}, "sqrt_2.5h")
    if method == "pause":
        token = fields.number("pause_token_id", PAUSE_TOKEN)
        if not 0 <= token < fields.vocabulary:
            raise UserError(f"{fields.where} pause_token_id = {token}: it must be an id below vocab_size.")
        options = {"pauses": count, "pause_token_id": token}
        return Pondering("pause", options, "sqrt_h" if scaled or not neox else "none")
    mixes = fields.flag("interpolation", True)
    if method == "ponderlm" and neox:  # modeling_gpt_neox_addhidden: E = E + h, never scaled, whatever the flags say
        return Pondering("ponderlm", {"steps": count, "feedback": "hidden"}, "none")
    if method == "ponderlm":
        options = {"steps": count, "accumulate": fields.flag("residual_interpolated_embeds")}
        return Pondering("ponderlm", options, "sqrt_h" if scaled else "none")
    topk = fields.number("interpolation_topk", 100) if mixes and fields.flag("interpolation_use_topk") else 0
    topk = min(topk, fields.vocabulary)
    options = {"latents": count, "jacobi": fields.number("num_jacobi_iterations", 3)}
    if fields.flag("random_jacobi_iterations"):
        options |= {"jacobi_from": 2, "jacobi_to": 4 if neox else 3}
    options |= {"softmax_feedback": True, "topk": topk} if mixes else {}
    scale = "sqrt_h" if mixes else "sqrt_2.5h"
    return Pondering("ponderlm2", options, scale if scaled else "none")
