"""FLOPs against numbers worked out by hand, outside this program."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megaponder.config.load import from_mapping
from megaponder.config.resolve import resolve
from megaponder.config.schema import RunConfig
from megaponder.monitor.throughput import Costs
from megaponder.plan.flops import attention_flops, inference_flops, mean_executed, mean_needed, step_flops
from megaponder.plan.freqkv import compression_flops
from megaponder.plan.layer import key_flops
from megaponder.ponder.settings import method_of


def config(preset: str, method: str = "vanilla", recompute: str = "none", **options: Any) -> RunConfig:
    return resolve(
        from_mapping(
            {
                "model": {"preset": preset},
                "ponder": {"method": method, "options": options},
                "parallel": {"recompute": recompute},
                "train": {"steps": 10},
            }
        )
    )


def forward(*args: Any, **options: Any) -> float:
    cfg = config(*args, **options)
    return step_flops(cfg, method_of(cfg)).forward / 1e9


# GFLOP per token, forward, sequence 2048, vocabulary 50304, from
#   lin = 2 L (4 H^2 + nm H F), att = 2 L H (n + 1), head = 2 V H
# Pause was worked out with (M + 1)^2 att; the exact mean of visible keys is smaller by (M + 1) M / 2 keys a token.
BY_HAND = [
    ("llama-410m", "vanilla", {}, 0.811),
    ("llama-410m", "loop", {"extra_passes": 3}, 2.934),
    ("llama-410m", "pause", {"pauses": 3}, 4.143),
    ("llama-410m", "ponderlm", {"steps": 3}, 3.553),
    ("llama-410m", "ponderlm", {"steps": 3, "topk": 100}, 3.244),
    ("llama-1.4b", "vanilla", {}, 2.836),
    ("llama-1.4b", "loop", {"extra_passes": 3}, 10.726),
    ("llama-1.4b", "pause", {"pauses": 3}, 13.143),
    ("llama-1.4b", "ponderlm", {"steps": 3}, 11.962),
    ("llama-1.4b", "ponderlm", {"steps": 3, "topk": 100}, 11.345),
    ("pythia-70m", "vanilla", {}, 0.102),
    ("pythia-70m", "loop", {"extra_passes": 3}, 0.253),
    ("pythia-70m", "pause", {"pauses": 3}, 0.404),
    ("pythia-70m", "ponderlm", {"steps": 3}, 0.562),
    ("pythia-70m", "ponderlm", {"steps": 3, "topk": 100}, 0.408),
    ("pythia-1.4b", "vanilla", {}, 2.823),
    ("pythia-1.4b", "loop", {"extra_passes": 3}, 10.675),
    ("pythia-1.4b", "ponderlm", {"steps": 3}, 11.912),
]


@pytest.mark.parametrize(("preset", "method", "options", "expected"), BY_HAND)
def test_forward_flops_by_hand(preset: str, method: str, options: dict[str, Any], expected: float) -> None:
    exact_pause = 0.0
    if method == "pause":
        cfg = config(preset, method, **options)
        layers, hidden = cfg.model.num_layers or 0, cfg.model.hidden_size or 0
        exact_pause = 4 * layers * hidden * 4 * 3 / 2 / 1e9  # 4 L H a key, 6 keys a token
    assert forward(preset, method, **options) + exact_pause == pytest.approx(expected, abs=0.0006)


def test_attention_counts_every_visible_key() -> None:
    """By enumeration, on a small case: m rows a token, each row sees itself and all rows before it."""
    cfg = config("llama-125m")
    for tokens, slots in ((5, 1), (5, 3), (1, 4)):
        keys = sum(row + 1 for row in range(tokens * slots))
        assert attention_flops(cfg.model, tokens, slots) * tokens == pytest.approx(4 * 12 * 768 * keys)


def test_documents_count_the_keys_that_tokens_see() -> None:
    """By enumeration: documents of 3 and 1 tokens in one sequence, of 4 in another; one that is decoded is whole."""
    cfg = config("llama-125m", "pause", pauses=1)
    cfg.data.sequence_length, cfg.data.document_attention = 4, True
    whole = step_flops(cfg, method_of(cfg)).passes[0].attention
    cfg.data.document_tokens = (3 * 3 + 1 + 4 * 4) / 8
    keys = sum(row + 1 for length in (3, 1, 4) for row in range(2 * length))
    assert step_flops(cfg, method_of(cfg)).passes[0].attention * 8 == pytest.approx(4 * 12 * 768 * keys)
    decoded = inference_flops(cfg, method_of(cfg))
    cfg.data.document_attention = False
    assert inference_flops(cfg, method_of(cfg)) == decoded
    assert step_flops(cfg, method_of(cfg)).passes[0].attention == whole


def test_passes_and_parts() -> None:
    cfg = config("llama-410m", "ponderlm", steps=3)
    passes = step_flops(cfg, method_of(cfg)).passes
    assert [p.index for p in passes] == [0, 1, 2, 3]
    assert [p.head > 0 for p in passes] == [False, False, False, True]
    assert [p.extra > 0 for p in passes] == [True, True, True, False]
    assert passes[0].extra == 4 * 50304 * 1024  # logits and mixture of one step
    assert sum(p.total for p in passes) == step_flops(cfg, method_of(cfg)).forward


def test_grouped_query_attention_saves_projections_only() -> None:
    cfg = config("llama-410m")
    whole = step_flops(cfg, method_of(cfg)).passes[0]
    cfg.model.num_kv_heads = 4
    grouped = step_flops(cfg, method_of(cfg)).passes[0]
    # k and v: 2 matrices of H x H become H x H/4, in 24 layers
    assert whole.linear - grouped.linear == 2 * 24 * 2 * 1024 * (1024 - 256)
    assert whole.attention == grouped.attention


def test_training_is_three_times_forward_and_recompute_adds_the_stack() -> None:
    plain, again = config("llama-410m", "loop"), config("llama-410m", "loop", recompute="layer")
    flops = step_flops(plain, method_of(plain))
    assert flops.needed == 3 * flops.forward == flops.executed == mean_needed(plain, method_of(plain))
    stack = flops.forward - 2 * 50304 * 1024
    assert mean_executed(again, method_of(again)) == pytest.approx(3 * flops.forward + stack)
    assert mean_needed(again, method_of(again)) == flops.needed
    again.train.eslm = {"by": "loss", "scope": "global"}  # all micro-batches forward once more, if there are several
    assert mean_executed(again, method_of(again), 2) == pytest.approx(4 * flops.forward + stack)
    assert mean_executed(again, method_of(again), 1) == pytest.approx(3 * flops.forward + stack)
    again.parallel.recompute_layers, again.parallel.recompute_passes = 6, 2  # of 24 layers and 4 passes
    assert mean_executed(again, method_of(again)) == pytest.approx(3 * flops.forward + stack * 6 / 24 * 2 / 4)


def test_a_published_throughput() -> None:
    """Llama-3-8B at 8192 tokens: 14,451 tokens/s a GPU were published as 744 TFLOP/s, with the causal half."""
    shape = {"family": "llama", "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8,
             "ffn_size": 14336, "vocab_size": 128256}  # fmt: skip
    cfg = resolve(from_mapping({"model": shape, "data": {"sequence_length": 8192}, "train": {"steps": 1}}))
    assert mean_needed(cfg, method_of(cfg)) * 14451 / 1e12 == pytest.approx(744, rel=1e-3)


def test_random_plans_are_averaged() -> None:
    cfg = config("llama-125m")
    cfg.train.steps = 200  # fewer than are averaged: all
    method = method_of(cfg)

    class Drawn:
        name, options, rider_channels = "drawn", None, 0
        mixes_vocabulary, keeps_kv, skips, core, reads_every_pass, weighs = False, False, False, None, False, False

        def passes(self, seed: int, step: int) -> Any:
            return method.passes(seed, step) * (1 + step % 2)

        def extra_flops(self, p: Any, vocab_size: int) -> float:
            return 0.0

        def feedback_flops(self, p: Any, vocab_size: int) -> float:
            return 0.0

        def training_flops(self, p: Any, vocab_size: int) -> float:
            return 0.0

    assert mean_needed(cfg, Drawn()) == pytest.approx(1.5 * mean_needed(cfg, method))


def test_what_gates_learn_from_costs_training_alone() -> None:
    """A budget of 3.6 of 4 passes: the losses after the third and the fourth are read, forward only."""
    head = 2 * 50304 * 1024
    plain = config("llama-410m", "adaponderlm", steps=3, target=0.0)
    held = config("llama-410m", "adaponderlm", steps=3, target=0.9)
    shares = [1.0, 1.0, 1.0, 0.6]
    flops = step_flops(held, method_of(held))
    assert [p.training for p in flops.passes] == [0, 0, head, head]
    stack, gate = flops.passes[0].linear + flops.passes[0].attention, 2 * method_of(held).options.gate_width * 1024**2
    forward = 3.6 * stack + 2.6 * 2 * head + gate + head  # a token that halts mixes nothing, and is read out as well
    assert flops.needed_of(shares) == pytest.approx(3 * forward + 1.6 * head)
    assert inference_flops(held, method_of(held), shares) == pytest.approx(forward)
    share = Costs(flops.needed, flops.executed, 1, None, flops).needed_share(shares)
    assert share == pytest.approx((3 * forward + 1.6 * head) / flops.needed)
    saved = 2 * gate  # gates of passes that all tokens run are not asked
    decoded = [inference_flops(c, method_of(c), shares) for c in (plain, held)]
    assert decoded[0] - decoded[1] == pytest.approx(saved)
    for stage, factor in ((1, 3), (2, 1)):
        ouro = config("llama-410m", "ouro", loops=4, stage=stage)
        assert [p.training for p in step_flops(ouro, method_of(ouro)).passes] == [factor * head] * 3 + [0]


def test_truncated_depth_saves_backwards() -> None:
    """Huginn, 2 + 4 r + 2 layers, r = 33, of which 8 are trained: 136 forward and 2 * 36 backward, not 408."""
    options = {"prelude": 2, "coda": 2, "recurrence": 33, "draw": "fixed"}
    cfg = config("llama-410m", "huginn", **options, kept=8)
    cfg.model.num_layers = 8
    flops = step_flops(cfg, method_of(cfg))
    h, tokens, layer = 1024, 2048, flops.passes[1].linear / 4 + flops.passes[1].attention / 4
    head, adapter = 2 * 50304 * h, 4 * h * h
    assert flops.forward == pytest.approx(136 * layer + head + 33 * adapter)
    assert flops.needed == pytest.approx(208 * layer + 3 * head + (33 + 2 * 8) * adapter)
    assert layer == pytest.approx(2 * (4 * h * h + 3 * h * cfg.model.ffn_size) + 2 * h * (tokens + 1))
    cfg.parallel.recompute = "layer"  # of the trained passes alone
    assert step_flops(cfg, method_of(cfg)).executed - flops.needed == pytest.approx((8 * 4 + 2) * layer)


def test_a_decoded_token_costs_its_rows_once() -> None:
    """llama-410m (24 x 1024, FFN 2816, 16 heads), 2048 tokens; 2 latents of PonderLM-2 make 3 rows a token."""
    layers, h, ffn, n, vocab = 24, 1024, config("llama-410m").model.ffn_size, 2048, 50304
    linear, head = 2 * layers * (4 * h * h + 3 * h * ffn), 2 * vocab * h
    plain = config("llama-410m")
    assert inference_flops(plain, method_of(plain)) == pytest.approx(linear + 2 * layers * h * (n + 1) + head)
    cfg = config("llama-410m", "ponderlm2", latents=2)
    rows = 3
    expected = rows * linear + 4 * layers * h * rows * (rows * n + 1) / 2 + head
    assert inference_flops(cfg, method_of(cfg)) == pytest.approx(expected, rel=1e-3)
    half = inference_flops(cfg, method_of(cfg), [1.0, 0.5, 0.0])
    assert half == pytest.approx(1.5 * linear + 4 * layers * h * 1.5 * (1.5 * n + 1) / 2 + head, rel=1e-3)


def test_depth_attention_by_hand() -> None:
    """llama-410m: 24 layers, 1024 channels in 16 heads; a layer and each source cost 4 x 1024 (a score, a share)."""
    cfg = config("llama-410m", "loop", extra_passes=1)

    def mixed(**depth: Any) -> float:
        cfg.model.depth_attention = {}
        plain = step_flops(cfg, method_of(cfg)).forward
        cfg.model.depth_attention = {"sources": "all", **depth}
        found = step_flops(cfg, method_of(cfg))
        assert found.forward - plain == pytest.approx(sum(p.mixing for p in found.passes), rel=1e-6)
        return sum(p.mixing for p in found.passes) / 4096

    # the nth of all layers has n sources, and competes itself unless there are none
    assert mixed() == pytest.approx(sum(n + 1 for n in range(1, 48)))
    assert mixed(passes="within") == pytest.approx(2 * sum(n + 1 for n in range(1, 24)))
    assert mixed(own="residual", sources="last:4") == pytest.approx(1 + 2 + 3 + 44 * 4)
    assert mixed(sources="stride:10") == pytest.approx(10 * 2 + 10 * 3 + 10 * 4 + 8 * 5)
    assert mixed(sources=[3, 20], passes="within") == pytest.approx(2 * (17 * 2 + 3 * 3))
    assert mixed(blocks=4, passes="within") == pytest.approx(8 * (2 + 3 + 4 + 5 + 6))
    cfg.model.num_kv_heads = 4  # a quarter of it for values, and scores of all heads or of their mean
    assert mixed(query="mean_prob", passes="within") == pytest.approx((4 + 1) / 8 * 2 * sum(range(2, 25)))
    assert mixed(passes="within") == pytest.approx(2 / 8 * 2 * sum(range(2, 25)))


def test_freqkv_by_hand() -> None:
    """Keys of every token counted one by one, and compressions of the published setting: 3 of 8192 tokens."""
    model = config("llama-tiny").model
    model.freqkv = {"capacity": 12, "sink": 2, "ratio": 0.5}  # seven rows of memory, five tokens a block
    for tokens in (12, 13, 17, 40):
        keys = sum(t + 1 if t < 7 else 7 + (t - 7) % 5 + 1 for t in range(tokens))
        assert attention_flops(model, tokens, 1) * tokens == pytest.approx(4 * 2 * 32 * keys)
    assert compression_flops(model, 12) == 0
    assert compression_flops(model, 13) * 13 == pytest.approx(2 * 32 * 2 * 10 * 5)
    cfg = config("llama-410m")
    cfg.model.max_positions, cfg.data.sequence_length = 8192, 8192
    plain = step_flops(cfg, method_of(cfg)).passes[0]
    cfg.model.freqkv = {"capacity": 4096}
    found = step_flops(cfg, method_of(cfg)).passes[0]
    ffts = sum(2.5 * n * math.log2(n) + 6 * n for n in (4092, 2046))
    assert found.compression == pytest.approx(24 * 2 * 1024 * 3 * ffts / 8192)
    assert found.linear == plain.linear and found.attention < 0.75 * plain.attention


@pytest.mark.parametrize(("window", "slots"), [(0, 1), (5, 1), (5, 3), (16, 2), (40, 2)])
def test_a_window_hides_the_keys_before_it(window: int, slots: int) -> None:
    tokens, model = 16, config("llama-tiny").model
    model.attention_window = window
    rows = [divmod(i, slots)[0] for i in range(tokens * slots)]
    seen = sum(not window or own - window < key for i, own in enumerate(rows) for key in rows[: i + 1])
    assert model.num_layers
    whole = model.num_layers * key_flops(model) * seen
    assert attention_flops(model, tokens, slots) * tokens == pytest.approx(whole)
