"""What breaks a rule of attention: context ranks, Depth-Attention, FreqKV."""

from __future__ import annotations

from megaponder.config.method_facts import MethodFacts
from tests.config.make import Broken, broken

FREQKV = {"capacity": 64}
ATTENTION: list[Broken] = [
    broken("parallel.context", "at least 1", parallel__context=0),
    broken(
        "data.sequence_length",
        "a multiple of 8, so that parallel.context = 4 ranks hold equal parts of it; the nearest is 104",
        world=4,
        parallel__context=4,
        data__sequence_length=100,
    ),
    broken(
        "world size",
        "parallel.tensor x parallel.pipeline x parallel.context = 1 x 1 x 2; the nearest is 4",
        world=3,
        parallel__context=2,
    ),
    broken(
        "precision.cuda_graphs",
        "passes of parallel.context = 2 ranks are not captured; use auto, or parallel.context: 1",
        world=2,
        parallel__context=2,
        precision__cuda_graphs=True,
    ),
    broken("model.depth_attention.source", "its options are sources, values", model__depth_attention={"source": "all"}),
    broken("model.depth_attention.own", "softmax or residual; use softmax", model__depth_attention={"own": "none"}),
    broken("model.depth_attention.sources", "or a list of layers; use all", model__depth_attention={"sources": "last"}),
    broken("model.depth_attention.sources", "last:N, stride:N", model__depth_attention={"sources": "stride:0"}),
    broken("model.depth_attention.sources", "in ascending order", model__depth_attention={"sources": [2, 1]}),
    broken("model.depth_attention.sources", "numbered from 0 to 11", model__depth_attention={"sources": [2, 12]}),
    broken("model.depth_attention.scale", "at least 0; use 0.0", model__depth_attention={"scale": -1.0}),
    broken("model.depth_attention.blocks", "at least 1; use 1", model__depth_attention={"blocks": 0}),
    broken("model.depth_attention.blocks", "num_layers = 12; the nearest is 4", model__depth_attention={"blocks": 5}),
    broken(
        "model.depth_attention.passes",
        "other rows from pass to pass, so rows of earlier passes do not match; use within",
        facts=MethodFacts(max_passes=2, max_slots=2),
        model__depth_attention={"sources": "all"},
    ),
    broken("model.depth_attention.passes", "its own pass only; use within", model__depth_attention={"blocks": 2}),
    broken(
        "model.depth_attention",
        "repeats a part of the stack, for which Depth-Attention is not built; use {}, or method loop",
        facts=MethodFacts(max_passes=2, core=(1, 11)),
        model__depth_attention={"passes": "within"},
    ),
    broken(
        "model.depth_attention.sources",
        "on 4 pipeline stages a message would grow with the number of layers before it, unless sources are last:N or "
        "blocks end where stages do; use last:3, or parallel.pipeline: 1",
        world=4,
        parallel__pipeline=4,
        model__depth_attention={"blocks": 2, "passes": "within"},
    ),
    broken(
        "parallel.context",
        "which one rank must hold; use 1, or model.freqkv: {}",
        world=2,
        parallel__context=2,
        model__freqkv={"capacity": 64},
    ),
    broken("model.freqkv.size", "its options are capacity, sink, ratio; take it out", model__freqkv={"size": 64}),
    broken("model.freqkv", "it needs capacity", model__freqkv={"sink": 4}),
    broken("model.freqkv.capacity", "at least 3; use 3", model__freqkv={"capacity": 2}),
    broken("model.freqkv.sink", "at least 0; use 0", model__freqkv={"capacity": 64, "sink": -1}),
    broken("model.freqkv.ratio", "more than 0 and less than 1", model__freqkv={"capacity": 64, "ratio": 1.0}),
    broken("model.freqkv.ratio", "it is text, and must be more than 0", model__freqkv={"capacity": 64, "ratio": "0.5"}),
    broken(
        "model.freqkv.sink",
        "leaves 1 row to compress, and there must be at least 2; use 4",
        model__freqkv={"capacity": 64, "sink": 63},
    ),
    broken("model.freqkv.ratio", "leaves none of 60 rows; use 0.5", model__freqkv={"capacity": 64, "ratio": 0.01}),
    broken(
        "model.positions",
        "new positions, which takes RoPE",
        model__preset="gpt2-small",
        model__freqkv=FREQKV,
        data__sequence_length=512,
    ),
    broken("model.qk_norm", "this norm comes after it", model__qk_norm="rotated", model__freqkv=FREQKV),
    broken("model.attention_window", "what the memory holds", model__attention_window=9, model__freqkv=FREQKV),
    broken(
        "model.rotary_scaling",
        "on which dynamic scaling depends",
        model__rotary_scaling={"rope_type": "dynamic", "factor": 2.0},
        model__freqkv=FREQKV,
    ),
    broken("model.depth_attention", "never tried", model__depth_attention={"own": "softmax"}, model__freqkv=FREQKV),
    broken("model.freqkv", "several rows", facts=MethodFacts(max_slots=2), model__freqkv=FREQKV),
    broken("model.freqkv", "of one pass; use {}", facts=MethodFacts(keeps_kv=True), model__freqkv=FREQKV),
]
