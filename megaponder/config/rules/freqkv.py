"""Rules on FreqKV: what its options may be, and which backbones and passes it fits."""

from __future__ import annotations

from megaponder.config.rules.case import Case, Rule, require, require_number, require_option
from megaponder.config.schema import RunConfig
from megaponder.decoding.freqkv_blocks import OPTIONS, read

FIELD = "model.freqkv"


def freqkv_is_whole(c: Case) -> None:
    """Each option of FreqKV is known and legal, and something is left of what is compressed."""
    given = c.cfg.model.freqkv or {}
    for name, value in given.items():
        require_option(FIELD, name, value, OPTIONS)
    if not given:
        return
    require("capacity" in given, FIELD, given, "it needs capacity, the rows of keys and values", "add capacity: 4096")
    for name, least in (("capacity", 3), ("sink", 0)):
        if (value := given.get(name, least)) is not None:
            whole = type(value) is int and value >= least
            rule = f"it must be a whole number of at least {least}"
            require_number(whole, f"{FIELD}.{name}", value, rule, f"use {least}")
    ratio = given.get("ratio", 0.5)
    share = type(ratio) is float and 0 < ratio < 1
    rule = "it must be more than 0 and less than 1: something is left, and something is not"
    require_number(share, f"{FIELD}.ratio", ratio, rule, "use 0.5")
    f = read(given)
    assert f is not None
    left = "1 row" if f.span == 1 else f"{max(0, f.span)} rows"
    rule = f"of capacity {f.capacity} it leaves {left} to compress, and there must be at least 2"
    require(f.span >= 2, f"{FIELD}.sink", f.sink, rule, f"use {min(4, f.capacity - 2)}")
    rule = f"it leaves none of {f.span} rows"
    require(f.kept >= 1, f"{FIELD}.ratio", ratio, rule, "use 0.5")


def freqkv_fits_backbone(c: Case) -> None:
    """Positions restart at the compressed memory, so keys must be rotated, and must see no other window."""
    m = c.cfg.model
    if not m.freqkv:
        return
    rule = "FreqKV gives rows of the memory new positions, which takes RoPE"
    require(m.positions == "rotary", "model.positions", m.positions, rule, "use rotary, or model.freqkv: {}")
    rule = "with FreqKV, keys are compressed before RoPE, and this norm comes after it"
    require(m.qk_norm != "rotated", "model.qk_norm", m.qk_norm, rule, "use head, or model.freqkv: {}")
    rule = "with FreqKV, a token attends to what the memory holds"
    require(not m.attention_window, "model.attention_window", m.attention_window, rule, "use 0, or model.freqkv: {}")
    rule = "with FreqKV, positions stay below its capacity whatever the text's length, on which dynamic scaling depends"
    dynamic = (m.rotary_scaling or {}).get("rope_type") == "dynamic"
    require(not dynamic, "model.rotary_scaling", m.rotary_scaling, rule, "use {}, or model.freqkv: {}")
    rule = "Depth-Attention and FreqKV both change what the cache holds, and were never tried together"
    require(not m.depth_attention, "model.depth_attention", m.depth_attention, rule, "use {}, or model.freqkv: {}")


def freqkv_fits_method(c: Case) -> None:
    """Each pass has one row for a token, and keys and values of its own, which get a memory of their own."""
    if not c.cfg.model.freqkv:
        return
    method, fix = c.cfg.ponder.method, "use {}, or a method such as loop or ponderlm"
    value = c.cfg.model.freqkv
    rule = f"in method {method} a token has several rows, and a memory counts tokens"
    require(c.facts.max_slots == 1, FIELD, value, rule, fix)
    rule = f"in method {method} passes read keys and values of earlier passes, and each memory is of one pass"
    require(not c.facts.keeps_kv, FIELD, value, rule, fix)


def freqkv_has_whole_sequences(c: Case) -> None:
    """A memory is made of all tokens before it, one block after the other."""
    rule = "with model.freqkv every block of a text waits for the memory of the one before, which one rank must hold"
    ok = not c.cfg.model.freqkv or c.cfg.parallel.context == 1
    require(ok, "parallel.context", c.cfg.parallel.context, rule, "use 1, or model.freqkv: {}")


def joined_documents(cfg: RunConfig) -> str:
    """A sentence if a memory goes on from one document of a sample to the next; empty otherwise."""
    if not cfg.model.freqkv or cfg.data.document_attention:
        return ""
    return (
        f"{FIELD}: where a sample holds several documents, their keys and values are compressed together; with "
        "data.document_attention: true each document begins with a memory of its own."
    )


RULES: tuple[Rule, ...] = (freqkv_is_whole, freqkv_fits_backbone, freqkv_fits_method, freqkv_has_whole_sequences)
