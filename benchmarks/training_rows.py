"""The configurations that `benchmarks.training` measures, in tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LENGTH = 2048


@dataclass
class Row:
    """One configuration."""

    name: str
    preset: str
    method: str = "vanilla"
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 4
    fp8: str = "none"
    graphs: bool = True
    plain: bool = False
    """Plain megatron-core."""
    halted: float | None = None
    """Share of token-passes that halt, at random places; the method is then `drawn` (`_halt_at_random`)."""
    skip: bool = False
    recompute: bool = False
    offloaded: int = 0
    """First passes whose activations lie in main memory."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    experts: int = 1
    """Ranks that share the experts of a mixture."""
    micro_batches: int | None = None
    features: dict[str, Any] = field(default_factory=dict)
    """Of the model."""
    unfused: bool = False
    """Depth-Attention by PyTorch's operations."""
    length: int = LENGTH
    """Tokens of a sequence."""
    zero: int | None = None
    """ZeRO's stage, on DeepSpeed; None: megatron-core."""
    offload: str = "none"
    """What DeepSpeed keeps in main memory."""


PONDER = ("ponderlm", {"steps": 3})
ADA = ("adaponderlm", {"steps": 3, "target": 0.0})


def _paired(preset: str, batch: int) -> list[Row]:
    name = preset.removeprefix("llama-")
    return [
        Row(f"megatron-core {name}", preset, batch=batch, plain=True),
        Row(f"vanilla {name}, eager", preset, batch=batch, graphs=False),
        Row(f"vanilla {name}, captured", preset, batch=batch),
    ]


def _passes(preset: str, batch: int, method: tuple[str, dict[str, Any]] = PONDER) -> list[Row]:
    return [
        Row(f"{method[0]} {preset}, {what}", preset, *method, batch=batch, fp8=fp8)
        for what, fp8 in (("BF16", "none"), ("FP8 current", "current"), ("FP8 delayed", "delayed"))
    ]


def _larger(preset: str, batch: int) -> list[Row]:
    """Adaptive passes with what fits: their gates and masks cost less of a larger micro-batch."""
    name = f"adaponderlm {preset}, batch {batch}"
    return [
        Row(f"{name}, {what}", preset, *ADA, batch=batch, fp8=fp8, micro_batches=4)
        for what, fp8 in (("BF16", "none"), ("FP8 delayed", "delayed"))
    ]


LOOP = ("loop", {"extra_passes": 3})


def _halting() -> list[Row]:
    return [
        Row(f"{share:.0%} halted, {how}", "pythia-1.4b", *ADA, batch=4, halted=share, skip=how == "gathered")
        for share in (0.0, 0.15, 0.3, 0.45)
        for how in ("masked", "gathered")
    ]


def _depths() -> list[Row]:
    return [
        Row(f"{preset} K={k}", preset, "loop" if k > 1 else "vanilla", {"extra_passes": k - 1} if k > 1 else {}, batch)
        for preset, batch in (("llama-410m", 8), ("llama-1.4b", 4))
        for k in (1, 2, 4)
    ]


def _latents() -> list[Row]:
    return [
        Row(f"ponderlm2 {preset}, {what}", preset, "ponderlm2", {"latents": 1, "jacobi": 3}, batch, fp8)
        for preset, batch in (("llama-410m", 4), ("llama-1.4b", 2))
        for what, fp8 in (("BF16", "none"), ("FP8 delayed", "delayed"))
    ]


def _looped() -> list[Row]:
    ends = {"prelude": 4, "coda": 4, "recurrence": 8, "draw": "fixed"}  # 16 of the 24 layers are the core
    return [
        Row(f"huginn-like llama-1.4b, r=8, {kept} kept, {how}", "llama-1.4b", "huginn", ends | {"kept": kept}, 2,
            graphs=how == "captured", micro_batches=4)
        for kept in (4, 8)
        for how in ("captured", "eager")
    ]  # fmt: skip


def _depth_attention() -> list[Row]:
    rows = []
    for name, heads in (("16 key/value heads", {}), ("4 key/value heads", {"num_kv_heads": 4})):
        rows.append(Row(f"plain, {name}", "llama-410m", batch=8, features=heads))
        for sources, unfused in (("all", False), ("last:4", False), ("all", True)):
            features = {**heads, "depth_attention": {"sources": sources}}
            told = f"{sources}, {name}" + (", unfused" if unfused else "")
            rows.append(Row(told, "llama-410m", batch=8, features=features, unfused=unfused))
    return rows


def _freqkv() -> list[Row]:
    long: dict[str, Any] = {"max_positions": 8192}
    rows = [Row("plain, 8192 tokens", "llama-410m", batch=2, features=long, length=8192)]
    for capacity in (4096, 2048, 1024):
        features = {**long, "freqkv": {"capacity": capacity}}
        rows.append(Row(f"capacity {capacity}, 8192 tokens", "llama-410m", batch=2, features=features, length=8192))
    return rows


MIXTURE: dict[str, Any] = {"experts": 32, "top_k": 8, "renormalise": False}
"""Experts of width 1024, of which a row meets as much as of a dense MLP of 8192: a billion parameters besides the
vocabulary."""
DENSE: dict[str, Any] = {"num_layers": 16, "num_heads": 16, "ffn_size": 8192}
SPARSE: dict[str, Any] = DENSE | {"ffn_size": 1024, "moe": MIXTURE}


def _moe(experts: int = 1) -> list[Row]:
    share = f", EP={experts}" if experts > 1 else ""
    sparse = {"features": SPARSE, "experts": experts, "graphs": False}
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("dense, captured", {"features": DENSE}),
        ("dense, eager", {"features": DENSE, "graphs": False}),
        (f"8 of 32 experts{share}", sparse),
    )
    larger: tuple[str, dict[str, Any]] = (f"8 of 32 experts{share}, larger micro-batches", sparse)
    return [
        Row(f"{name}, {told}", "llama-1.4b", *method, batch=batch, micro_batches=16 // batch, **more)
        for told, batch, method, rows in (
            ("one pass", 4, ("vanilla", {}), kinds),
            ("one pass", 8, ("vanilla", {}), (larger,)),
            ("four passes", 4, LOOP, kinds),
        )
        for name, more in rows
    ]


def _long() -> list[Row]:
    layouts: tuple[tuple[str, dict[str, Any]], ...] = (("CP=2", {"context": 2}), ("TP=2 + SP", {"tensor": 2}))
    return [
        Row(f"{name}, {length // 1024}k tokens, {told}", "llama-1.4b", *method, batch=1, length=length, recompute=True,
            graphs=False, micro_batches=1, features={"max_positions": length}, **sizes)
        for length, told, method in (
            (32768, "one pass", ("vanilla", {})), (32768, "four passes", LOOP), (131072, "one pass", ("vanilla", {})),
        )
        for name, sizes in layouts
    ] + [
        Row(f"CP=2, {length // 1024}k tokens, four passes, {n} offloaded", "llama-1.4b", *LOOP, batch=1, length=length,
            recompute=True, offloaded=n, context=2, graphs=False, micro_batches=1, features={"max_positions": length})
        for length, n in ((32768, 3), (131072, 0), (131072, 3))
    ]  # fmt: skip


def _engines() -> list[Row]:
    common: dict[str, Any] = {"batch": 2, "micro_batches": 4}
    first = [
        Row(f"megatron-core, distributed optimizer, {how}", "llama-2.8b", *PONDER, **common, graphs=how == "captured")
        for how in ("captured", "eager")
    ]
    stages = ((1, "none"), (2, "none"), (2, "optimizer"), (3, "none"), (3, "weights"))
    return first + [
        Row(f"DeepSpeed, stage {zero}" + (f", {offload} offloaded" if offload != "none" else ""), "llama-2.8b",
            *PONDER, **common, zero=zero, offload=offload, graphs=False)
        for zero, offload in stages
    ]  # fmt: skip


def _layouts(gpus: int) -> list[Row]:
    """1.4B with four passes, 16 sequences a GPU and step; pipelines also with other numbers of micro-batches."""

    def row(tensor: int, pipeline: int, count: int | None = None, told: str = "BF16", **more: Any) -> Row:
        replica = tensor * pipeline
        sizes = {"DP": gpus // replica, "TP": tensor, "PP": pipeline}
        name = " x ".join(f"{kind}{size}" for kind, size in sizes.items() if size > 1)
        method = more.pop("method", PONDER)
        batch = more.pop("batch", 2 if pipeline == 8 else 4)  # of 4 the last stage would hold 157 GiB
        return Row(f"{name}, {told}" + (f", M={count}" if count else ""), "llama-1.4b", *method, batch=batch,
                   micro_batches=count or 16 // batch * replica, tensor=tensor, pipeline=pipeline, **more)  # fmt: skip

    powers = [2**i for i in range(gpus.bit_length())]
    every = [(t, p) for t in powers for p in powers if t * p <= gpus]
    chosen = [(1, 1), (2, 1), (gpus, 1), *((1, p) for p in powers[1:]), (2, 2), (gpus // 2, 2)]
    layouts = [each for each in every if each in chosen]
    halting: dict[str, Any] = {"method": ADA, "halted": 0.3, "skip": True}
    latents: dict[str, Any] = {"method": ("ponderlm2", {"latents": 1, "jacobi": 3}), "batch": 2}
    return [
        *(row(t, p) for t, p in layouts),
        *(row(t, p, told="FP8 delayed", fp8="delayed") for t, p in layouts),
        *(row(1, p, count) for p in powers[2:] for count in (8, 16, 32) if p == 8 or count != 4 * p),
        *(row(t, p, told="30% halted, gathered", **halting) for t, p in ((1, 1), (1, 2))),
        *(row(t, p, told="ponderlm2", **latents) for t, p in ((1, 1), (1, 2))),
    ]


TABLES: dict[str, list[Row]] = {
    "baseline": [*_paired("llama-410m", 8), *_paired("llama-1.4b", 4)],
    "methods": [
        *_passes("pythia-410m", 8),
        *_passes("pythia-410m", 8, ADA),
        *_larger("pythia-410m", 12),
        *_passes("pythia-1.4b", 4),
        *_passes("pythia-1.4b", 4, ADA),
        *_larger("pythia-1.4b", 6),
    ],
    "passes": _depths(),
    "ponderlm2": _latents(),
    "halting": _halting(),
    "looped": _looped(),
    "depth-attention": _depth_attention(),
    "freqkv": _freqkv(),
    "one-gpu": [
        Row("K=4, batch 2", "llama-1.4b", *LOOP, batch=2, micro_batches=8),
        Row("K=4, batch 4", "llama-1.4b", *LOOP, batch=4, micro_batches=4),
        Row("K=4, batch 8", "llama-1.4b", *LOOP, batch=8, micro_batches=2),
    ],
    "two-gpus": [
        Row("DP=2, batch 4", "llama-1.4b", *LOOP, batch=4, micro_batches=4),
        Row("PP=2, batch 2", "llama-1.4b", *LOOP, batch=2, micro_batches=8, pipeline=2),
        Row("PP=2, batch 2, eager", "llama-1.4b", *LOOP, batch=2, micro_batches=8, pipeline=2, graphs=False),
        Row("TP=2 + SP, batch 4", "llama-1.4b", *LOOP, batch=4, micro_batches=4, tensor=2),
        Row("TP=2 + SP, batch 8", "llama-1.4b", *LOOP, batch=8, micro_batches=2, tensor=2),
        Row("TP=2 + SP, batch 16", "llama-1.4b", *LOOP, batch=16, micro_batches=1, tensor=2),
    ],
    "four-gpus": _layouts(4),
    "eight-gpus": _layouts(8),
    "moe": _moe(),
    "moe-two-gpus": _moe(2)[2::3],
    "long": _long(),
    "engines": _engines(),
}
"""`one-gpu` is what the ratios of `two-gpus` refer to: run both in one call."""
WORLDS = {"two-gpus": 2, "moe-two-gpus": 2, "long": 2, "engines": 2, "four-gpus": 4, "eight-gpus": 8}
"""Processes of a table, where they are not one."""
