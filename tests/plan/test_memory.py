"""The memory estimate against what autograd saves and against the schedules' own order."""

from __future__ import annotations

from typing import Any

import pytest

from megaponder.config.load import from_mapping
from megaponder.config.method_facts import MethodFacts
from megaponder.config.resolve import resolve
from megaponder.config.schema import RunConfig
from megaponder.plan.memory import Job, Memory, layer_activations, layer_input, rank_memory, settle_graphs
from megaponder.ponder.facts import facts_of
from megaponder.ponder.settings import method_of
from tests.distributed import run_workers

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-gqa": {"family": "llama", "num_kv_heads": 2},
    "pythia": {"family": "pythia"},
    "pythia-sequential": {"family": "pythia", "parallel_residual": False},
    "gpt2": {"family": "gpt2"},
    "qk-norm": {"family": "qwen3", "num_kv_heads": 2, "head_size": 24},
    "qk-layernorm": {"family": "gpt2", "qk_norm": "head"},
    "sandwich": {"family": "llama", "norm_placement": "sandwich"},
    "sandwich-parallel": {"family": "pythia", "norm_placement": "sandwich"},
    "olmo2": {"family": "llama", "norm_placement": "post", "qk_norm": "all", "num_kv_heads": 2},
    "post-parallel": {"family": "pythia", "norm_placement": "post", "norm_affine": False, "activation": "relu2"},
    "stream": {"family": "llama", "norm_placement": "stream", "qkv_bias": "qk", "rotary_pairs": "adjacent"},
    "rotated-norm": {"family": "llama", "qk_norm": "rotated", "num_kv_heads": 2, "activation": "relu"},
    "depth": {"family": "llama", "depth_attention": {"sources": "all"}},
    "depth-gqa": {"family": "llama", "num_kv_heads": 2, "depth_attention": {"values": "raw", "own": "residual"}},
    "freqkv": {"family": "llama", "freqkv": {"capacity": 30}},
    "freqkv-gqa": {"family": "qwen3", "num_kv_heads": 2, "freqkv": {"capacity": 24, "sink": 1, "ratio": 0.7}},
    "moe": {"family": "llama", "ffn_size": 96, "moe": {"experts": 4, "top_k": 2}},
    "moe-shared": {
        "family": "qwen3",
        "num_kv_heads": 2,
        "moe": {"experts": 8, "top_k": 3, "shared_ffn": 64, "score": "sigmoid"},
    },
    "wide-heads": {"family": "llama", "head_size": 24, "num_kv_heads": 2, "qkv_bias": True, "activation": "gelu"},
}
TOKENS, BATCH, VOCAB = 64, 2, 512


def config(
    shape: str,
    layers: int,
    dtype: str,
    recompute: str,
    method: str = "vanilla",
    parts: int | None = None,
    documents: bool = False,
    **options: Any,
) -> RunConfig:
    model = {"num_layers": layers, "hidden_size": 64, "num_heads": 4, "ffn_size": 160, "vocab_size": VOCAB}
    return resolve(
        from_mapping(
            {
                "model": model | SHAPES[shape],
                "ponder": {"method": method, "options": options},
                "data": {"sequence_length": TOKENS, "document_attention": documents},
                "parallel": {"recompute": recompute, "recompute_layers": parts, "recompute_passes": parts},
                "precision": {"dtype": dtype, "implementation": "local"},
                "train": {"steps": 1, "global_batch": BATCH, "micro_batch": BATCH},
            }
        )
    )


def saved_bytes(cfg: RunConfig) -> tuple[int, int]:
    """In a worker: parameters of the built model, and bytes that autograd keeps of one micro-batch's passes."""
    import torch

    from megaponder.data.batch import MicroBatch
    from megaponder.engine import groups
    from megaponder.engine.build import build_stage
    from megaponder.engine.stash import PassState

    method = method_of(cfg)
    stage = build_stage(cfg, method, groups.init(cfg))
    own = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    kept: dict[int, Any] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return t

    ids = torch.randint(0, VOCAB, (BATCH, TOKENS))
    starts = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    starts[:, TOKENS // 3 :] = TOKENS // 3
    starts = starts if cfg.data.document_attention else None  # type: ignore[assignment]
    batch, state, flow = MicroBatch(ids, ids, torch.ones(BATCH, TOKENS), starts), PassState(), None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for p in method.passes(0, 0):
            flow = stage.run_pass(p, batch, flow, state, None)
    return sum(p.numel() for p in stage.parameters()), sum(s.nbytes() for s in kept.values())


def measure(cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """In a worker: `saved_bytes` of many configurations."""
    return [saved_bytes(config(**case)) for case in cases]


def test_counts_match_what_is_built_and_saved() -> None:
    from megaponder.plan.build import own_parameters
    from megaponder.plan.parameters import model_parameters

    layers: list[dict[str, Any]] = [
        {"shape": shape, "dtype": dtype, "recompute": recompute}
        for shape in SHAPES
        for dtype, recompute in (("fp32", "none"), ("bf16", "none"), ("fp32", "layer"))
    ]
    methods: list[dict[str, Any]] = [
        {"shape": "llama", "dtype": "fp32", "recompute": "none", "layers": 2, "method": method}
        for method in ("loop", "ponderlm")
    ]
    methods.append(methods[0] | {"recompute": "layer", "parts": 1})  # one of two layers, in one of the passes
    ends: dict[str, Any] = {"method": "huginn", "prelude": 1, "coda": 1, "recurrence": 4, "kept": 2, "draw": "fixed"}
    methods.append(methods[0] | {"layers": 6} | ends)
    methods.append({"shape": "sandwich", "dtype": "fp32", "recompute": "none", "layers": 2, "method": "ouro"})
    cases = [case | {"layers": n} for case in layers for n in (2, 3)] + methods
    apart: list[dict[str, Any]] = [
        {"shape": "llama", "recompute": "none", "layers": 2, "dtype": dtype, "documents": documents} | method
        for dtype in ("fp32", "bf16")
        for method in ({"method": "loop"}, {"method": "ponderlm3", "latents": 2, "jacobi": 1, "target": 0.0})
        for documents in (False, True)
    ]
    merged = apart[0] | {"method": "adaptive_cot", "steps": 2, "target": 0.0, "documents": True}
    last = [*apart, merged, merged | {"layers": 3}]
    cases += last
    found = run_workers("tests.plan.test_memory:measure", 1, args={"cases": cases})[0]

    for case, (parameters, _) in zip(cases, found, strict=True):
        cfg = config(**case)
        own = own_parameters(method_of(cfg), case["layers"])
        assert model_parameters(cfg.model, own, padded=True).total == parameters, case
    for i, case in enumerate(layers):  # a third layer more
        cfg = config(**case, layers=2)
        kept = layer_input if case["recompute"] == "layer" else layer_activations
        expected = kept(cfg, BATCH * TOKENS)
        assert found[2 * i + 1][1] - found[2 * i][1] == pytest.approx(expected, rel=0.06), case

    def planned(case: dict[str, Any]) -> int:
        cfg = config(**case)
        return rank_memory(Job(cfg, facts_of(method_of(cfg)), method_of(cfg).passes(0, 0), 1), 0).activations

    for i in range(0, len(apart), 2):  # masks of documents, one a layer
        (_, joined), (_, parted) = found[i - len(last)], found[i + 1 - len(last)]
        assert parted - joined == planned(last[i + 1]) - planned(last[i]), last[i]
    # where keys of several passes are merged, as many as there are sets
    without = [planned(case | {"documents": False}) for case in last[-2:]]
    masks = (planned(last[-1]) - without[1]) - (planned(last[-2]) - without[0])
    assert masks == (1 + 2 + 3) * BATCH * TOKENS**2 * 4 < found[-1][1] - found[-2][1]

    for case, (_, measured) in zip(methods, found[-len(methods) - len(last) : -len(last)], strict=True):
        cfg = config(**case)
        method = method_of(cfg)
        memory = rank_memory(Job(cfg, facts_of(method), method.passes(0, 0), 1), 0)
        logits = BATCH * TOKENS * VOCAB * (4 + 4)  # of the head, which was not run, and their gradient
        if method.reads_every_pass:  # here the head was run
            logits //= 2
        held = memory.activations + memory.vocabulary - logits
        if cfg.parallel.recompute == "layer":  # the layer whose backward runs: none does here
            held -= layer_activations(cfg, BATCH * TOKENS)
        assert measured == pytest.approx(held, rel=0.06), case


def big(**parallel: Any) -> RunConfig:
    return resolve(
        from_mapping(
            {
                "model": {"preset": "llama-1.4b"},
                "ponder": {"method": "ponderlm"},
                "parallel": parallel,
                "precision": {"dtype": "bf16"},
                "train": {"steps": 1, "global_batch": 1024},
            }
        )
    )


def memory(cfg: RunConfig, world: int, stage: int = 0) -> Memory:
    method = method_of(cfg)
    return rank_memory(Job(cfg, facts_of(method), method.passes(0, 0), world, te=True), stage)


def test_bytes_of_the_state_by_hand() -> None:
    one = memory(big(), 1)
    n = 1_420_396_544
    assert (one.weights, one.gradients, one.optimizer) == (2 * n, 4 * n, 12 * n)
    assert memory(big(distributed_optimizer=True), 64).optimizer == -(-12 * n // 64)
    assert memory(big(), 64).optimizer == 12 * n
    fp32 = big()
    fp32.precision.dtype = "fp32"
    assert (memory(fp32, 1).weights, memory(fp32, 1).optimizer) == (4 * n, 8 * n)
    fp8 = big()
    fp8.precision.fp8 = "current"
    assert memory(fp8, 1).weights - one.weights == 2 * (402_653_184 + 811_597_824)
    fp8.precision.fp8 = "nvfp4"  # 4 bits, and 8 of scale for 16 elements
    assert memory(fp8, 1).weights - one.weights == 2 * (402_653_184 + 811_597_824) * 9 // 16


def test_layouts_move_memory_where_they_should() -> None:
    plain = memory(big(), 64)
    tensor = memory(big(tensor=2), 64)
    sequence = memory(big(tensor=2, sequence=True), 64)
    assert plain.activations > tensor.activations > sequence.activations == plain.activations // 2
    assert memory(big(recompute="layer"), 64).activations < plain.activations / 4
    cfg = big(pipeline=4)
    graphs = memory(cfg, 64)
    cfg.precision.cuda_graphs = False
    first, last = (memory(cfg, 64, stage) for stage in (0, 3))
    assert first.activations > last.activations and first.vocabulary == 0 < last.vocabulary
    m, rows = cfg.model, cfg.train.micro_batch * cfg.data.sequence_length
    assert m.hidden_size and m.ffn_size
    inside = (3 if m.gated else 2) * m.ffn_size + 2 * m.hidden_size  # of a layer, while its backward runs
    places = first.activations * 24 / 19 + 23 * rows * inside * 2  # against passes in flight; one is in the overhead
    assert graphs.activations == pytest.approx(places)
    for world in (64, 4096):  # a plan of thousands of GPUs is arithmetic
        assert memory(big(pipeline=4, distributed_optimizer=True), world).total > 0


def test_ranks_that_share_sequences_hold_half_and_gather_once() -> None:
    """Beside their own tokens, keys and values of a whole sequence and their gradients, in BF16, of one layer."""
    cfg = big(distributed_optimizer=True)
    cfg.precision.cuda_graphs = False
    alone = memory(cfg, 64)
    cfg = big(distributed_optimizer=True, context=2)
    shared, m = memory(cfg, 64), cfg.model
    gathered = 4 * cfg.data.sequence_length * m.query_width * 2
    assert shared.activations == alone.activations // 2 + gathered
    assert (2 * shared.vocabulary, shared.optimizer) == (alone.vocabulary, alone.optimizer)
    cfg.data.document_attention = True  # a mask and a bias
    rows = cfg.data.sequence_length
    assert memory(cfg, 64).activations == shared.activations + rows // 2 * rows * 3


def test_auto_leaves_graphs_out_where_they_do_not_fit() -> None:
    cfg = big(pipeline=4)
    method = method_of(cfg)
    job = Job(cfg, facts_of(method), method.passes(0, 0), 64)
    captured = max(memory(cfg, 64, s).total for s in range(4))
    eager = settle_graphs(job, captured - 1)
    assert eager.precision.cuda_graphs is False and cfg.precision.cuda_graphs == "auto"
    assert settle_graphs(job, captured) is cfg
    least = max(memory(eager, 64, s).total for s in range(4))
    assert settle_graphs(job, least).precision.cuda_graphs is False
    assert settle_graphs(job, least - 1) is cfg, "neither fits: the plan says so"
    cfg.precision.cuda_graphs = True
    assert settle_graphs(job, least) is cfg


def test_in_flight_passes_drive_the_mixture_memory() -> None:
    cfg = big(pipeline=4)
    rows = cfg.train.micro_batch * 2048
    head = rows * 50304 * (2 + 2)
    # three of four passes keep their probabilities in bf16; captured, with room for two gradients each
    each = int(rows * 50304 * 2 * 0.75)
    assert memory(cfg, 4, 3).vocabulary == head + 3 * 21 * each  # places of the last stage
    cfg.precision.cuda_graphs = False
    assert memory(cfg, 4, 3).vocabulary == head + 13 * each  # passes in flight on the last stage
    assert MethodFacts().mixes_vocabulary is False
