"""What the GPU tests run in a process of their own."""

from __future__ import annotations

from typing import Any

from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, RunConfig
from tests.gpu import one_card


def config(
    family: str, method: str, options: dict[str, Any], implementation: str, dtype: str, features: dict[str, Any]
) -> RunConfig:
    """A small model with sizes that the fused kernels accept."""
    model = ModelConfig(
        family=family,  # type: ignore[arg-type]
        num_layers=4,
        hidden_size=256,
        num_heads=4,
        ffn_size=512,
        vocab_size=1000,
        init_std=0.05,
        **features,
    )
    cfg = RunConfig(model=model)
    cfg.ponder.method, cfg.ponder.options = method, options
    cfg.data.sequence_length, cfg.train.steps, cfg.train.global_batch, cfg.train.micro_batch = 128, 1, 8, 4
    cfg.precision.implementation, cfg.precision.dtype = implementation, dtype  # type: ignore[assignment]
    return resolve(cfg)


def compare_implementations(
    family: str,
    method: str,
    options: dict[str, Any],
    features: dict[str, Any],
    documents: bool = False,
    at_once: int = 4,
) -> dict[str, Any]:
    """Loss and gradients of PyTorch's layers in FP32 and of both implementations in BF16, on equal weights."""
    import torch

    from megaponder.backbone.init import global_names
    from megaponder.engine import groups
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    batches = _batches(5, documents=documents, at_once=at_once)
    out: dict[str, Any] = {}
    for name, implementation, dtype in (("fp32", "local", "fp32"), ("local", "local", "bf16"), ("te", "te", "bf16")):
        cfg = config(family, method, options, implementation, dtype, features)
        engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
        engine.zero_grad()
        step = engine.forward_backward(batches, 0, train=True)
        learnt = [(_plain(k), p) for k, p in global_names(engine.stage) if p.requires_grad]
        grads = {k: p.main_grad.float().flatten().double().cpu() for k, p in learnt}
        out[name] = {"loss": step.loss, "grad": torch.cat([grads[k] for k in sorted(grads)])}
    return {
        "loss": {k: v["loss"] for k, v in out.items()},
        "error": {
            k: float((v["grad"] - out["fp32"]["grad"]).norm() / out["fp32"]["grad"].norm()) for k, v in out.items()
        },
        "params": {k: v["grad"].numel() for k, v in out.items()},
    }


def compare_contexts(cases: dict[str, tuple[str, str, dict[str, Any], bool]]) -> dict[str, dict[str, dict[str, float]]]:
    """In two ranks: by case (family, method, options, documents) the loss and the gradient's error against FP32, of
    ranks that run sequences of their own in BF16, and of ranks that share them, with both implementations."""
    import torch

    from megaponder.backbone.init import global_names
    from megaponder.engine import groups
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    one_card.share()
    variants = {"fp32": ("local", "fp32", 1), "apart": ("te", "bf16", 1)}
    variants |= {"te": ("te", "bf16", 2), "local": ("local", "bf16", 2)}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for case, (family, method, options, documents) in cases.items():
        whole = _batches(5, documents=documents)
        grads, found[case] = {}, {}
        for name, (implementation, dtype, context) in variants.items():
            cfg = config(family, method, options, implementation, dtype, {})
            cfg.parallel.context = context
            place = groups.init(cfg)
            engine = build_engine(cfg, method_of(cfg), place)
            engine.zero_grad()
            out = engine.forward_backward(whole[place.dp_rank :: place.dp_size], 0, train=True)
            named = {_plain(k): p.main_grad.flatten().double().cpu() for k, p in global_names(engine.stage)}
            grads[name] = torch.cat([named[k] for k in sorted(named)])
            error = float((grads[name] - grads["fp32"]).norm() / grads["fp32"].norm())
            found[case][name] = {"loss": out.loss, "error": error}
    return found


def _plain(name: str) -> str:
    """Transformer Engine's names of fused norms -> those of separate norms."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def _engine(cfg: RunConfig) -> Any:
    from megaponder.engine import groups
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
    engine.zero_grad()
    return engine


def _batches(step: int, count: int = 2, documents: bool = False, at_once: int = 4) -> list[Any]:
    """Micro-batches; documents are 20 tokens long in the mean, and in every third step 5, of which there are more."""
    import torch

    from megaponder.data.batch import make_micro_batch

    draw = torch.Generator().manual_seed(step)
    text = torch.randint(0, 1000, (4 * count, 129), generator=draw)
    if documents:
        text[torch.rand(text.shape, generator=draw) < (0.2 if step % 3 == 0 else 0.05)] = 0
    return [make_micro_batch(t.numpy(), "plain", 0, documents) for t in text.split(at_once)]


def _gradient(engine: Any) -> Any:
    import torch

    return torch.cat([p.main_grad.flatten().double().cpu() for p in engine.stage.parameters() if p.requires_grad])


def _descend(engine: Any) -> None:
    import torch

    with torch.no_grad():
        for p in engine.stage.parameters():
            if not p.requires_grad:
                continue
            p.add_((-0.05 * p.main_grad).to(p.dtype))
    engine.zero_grad()


def _case(case: dict[str, Any], precision: str) -> RunConfig:
    fp8 = precision not in ("fp32", "bf16")
    implementation = "local" if precision == "fp32" else "te"
    cfg = config(
        case["family"],
        case["method"],
        case.get("options", {}),
        implementation,
        "fp32" if precision == "fp32" else "bf16",
        case.get("features", {}),
    )
    cfg.parallel.distributed_optimizer = precision != "fp32"  # with it, GEMMs add to the gradients themselves
    cfg.precision.fp8 = precision if fp8 else "none"  # type: ignore[assignment]
    cfg.ponder.skip_halted = case.get("skip", False)
    cfg.parallel.recompute = "layer" if case.get("recompute") else "none"
    cfg.parallel.tensor, cfg.parallel.pipeline = case.get("tensor", 1), case.get("pipeline", 1)
    cfg.parallel.sequence = cfg.parallel.tensor > 1
    cfg.train.global_batch *= case.get("data", 1)
    return cfg


def compare_capture(case: dict[str, Any], precision: str) -> dict[str, Any]:
    """Six steps of gradient descent, eager and captured, each step from the eager run's weights."""
    import torch

    one_card.share()
    out: dict[str, Any] = {"gradient_errors": [], "loss_errors": [], "losses": []}
    engines = []
    for graphs in (False, True):
        cfg = _case(case, precision)
        cfg.precision.cuda_graphs = graphs
        engines.append(_engine(cfg))
    eager, captured = engines
    if "waits" in case:
        _make_wait(captured.stage, from_pass=case["waits"])
    for step in range(6):
        number = step + 100 * eager.groups.dp_rank
        batches = _batches(number, case.get("micro_batches", 2), case.get("documents", False))
        a = eager.forward_backward(batches, step, train=True)
        b = captured.forward_backward(batches, step, train=True)
        ours, theirs = _gradient(captured), _gradient(eager)
        out["gradient_errors"].append(float((ours - theirs).norm() / theirs.norm()))
        out["loss_errors"].append(abs(a.loss - b.loss) / a.loss)
        out["losses"].append(b.loss)
        eager.settle(a, step)
        _descend(eager)
        captured.zero_grad()
        with torch.no_grad():  # the same weights again, so that differences do not add up
            for p, q in zip(captured.stage.parameters(), eager.stage.parameters(), strict=True):
                p.copy_(q)
    out["graphs"], out["failure"] = captured._runner.captures.count, captured._runner.captures.failure
    return out


def _make_wait(stage: Any, from_pass: int) -> None:
    """From this pass on, a layer that makes the host wait for the GPU, which no capture survives."""
    import torch

    run_pass, now = stage.run_pass, 0

    def watched(p: Any, *rest: Any) -> Any:
        nonlocal now
        now = p.index
        return run_pass(p, *rest)

    def waits(*_: Any) -> None:
        if now >= from_pass:
            torch.zeros(1, device="cuda").item()

    stage.run_pass = watched
    stage.decoder.layers[-1].register_forward_pre_hook(waits)


def compare_fp8(recipe: str, family: str, features: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of FP8 against BF16 on equal weights, after two steps that fill the amax history."""
    case = {"family": family, "method": "ponderlm", "options": {"steps": 2}, "features": features}
    found = []
    for precision in ("bf16", recipe):
        cfg = _case(case, precision)
        cfg.precision.cuda_graphs = False
        engine = _engine(cfg)
        for _ in range(3):
            engine.zero_grad()
            out = engine.forward_backward(_batches(0), 0, train=True)
        found.append((out.loss, _gradient(engine)))
    (loss, grad), (loss8, grad8) = found
    return {"loss_error": abs(loss8 - loss) / loss, "gradient_error": float((grad8 - grad).norm() / grad.norm())}


def gathered_fp8(recipe: str, options: dict[str, Any] | None = None) -> list[int]:
    """Rows of the layers in passes of one sequence of 272 tokens, of which 20 go on; a sixteenth would be 17 rows."""
    import torch

    from megaponder.data.batch import MicroBatch

    case = {"family": "llama", "method": "adaponderlm", "options": options or {}, "skip": True}
    cfg = _case(case, recipe)
    cfg.data.sequence_length = cfg.model.max_positions = 272
    cfg.train.micro_batch, cfg.precision.cuda_graphs = 1, False
    engine = _engine(cfg)
    stage, rows = engine.stage, []
    if recipe == "fp32":  # without a GPU: what FP8 asks for, without FP8
        stage.row_multiple = 16
    all_active = stage.method.active

    def active(*args: Any) -> Any:
        found = all_active(*args)
        return None if found is None else found & (torch.arange(272, device=found.device)[:, None] < 20)

    stage.method.active = active
    stage.decoder.layers[0].register_forward_pre_hook(
        lambda _, args, named: rows.append((args[0] if args else named["hidden_states"]).shape[0]), with_kwargs=True
    )
    text = torch.randint(0, 1000, (2, 273), generator=torch.Generator().manual_seed(0))
    batches = [MicroBatch(t[:, :-1], t[:, 1:], torch.ones(1, 272)) for t in text.split(1)]
    out = engine.forward_backward(batches, 0, train=True)
    assert out.loss > 0
    return rows


def watch_fp8_weights(recipe: str) -> dict[str, Any]:
    """What happens to the quantised weights and their scales within and after a step."""
    import torch

    cfg = _case({"family": "pythia", "method": "ponderlm", "options": {"steps": 2}}, recipe)
    cfg.precision.cuda_graphs = False
    engine = _engine(cfg)
    engine.forward_backward(_batches(0), 0, train=True)
    stage, seen = engine.stage, []

    def weights() -> list[Any]:
        return [m._fp8_workspaces["weight"].dequantize().clone() for m in stage.fp8._modules.values()]

    def scales() -> list[Any]:
        return (
            [m.fp8_meta["scaling_fwd"].scale.clone() for m in stage.fp8._modules.values()]
            if recipe == "delayed"
            else []
        )

    run_pass = stage.run_pass

    def watched(*args: Any) -> Any:
        out = run_pass(*args)
        seen.append((weights(), scales()))
        return out

    stage.run_pass = watched
    engine.forward_backward(_batches(1, count=1), 1, train=True)
    before = weights()
    _descend(engine)
    engine.forward_backward(_batches(2, count=1), 2, train=True)
    after = weights()
    first = seen[:3]
    return {
        "weights": len(before),
        "passes": len(seen) // 2,
        "changed_within_step": sum(
            not torch.equal(x, y) for later, _ in first[1:] for x, y in zip(first[0][0], later, strict=True)
        ),
        "scales_changed_within_step": sum(
            not torch.equal(x, y) for _, later in first[1:] for x, y in zip(first[0][1], later, strict=True)
        ),
        "changed_after_step": sum(not torch.equal(x, y) for x, y in zip(before, after, strict=True)),
    }


def layers_in_fp8(edge: int) -> list[bool]:
    """Per layer, whether a step has quantised its weights."""
    cfg = _case({"family": "llama", "method": "vanilla"}, "current")
    cfg.precision.fp8_bf16_layers, cfg.precision.cuda_graphs = edge, False
    engine = _engine(cfg)
    engine.forward_backward(_batches(0), 0, train=True)
    return [any(getattr(m, "_fp8_workspaces", None) for m in layer.modules()) for layer in engine.stage.decoder.layers]


def start_in_fp8(recipe: str) -> dict[str, Any]:
    """What the comparison at the start says, and what it refuses."""
    from megaponder.errors import UserError
    from megaponder.training.canary import check_fp8

    cfg = _case({"family": "pythia", "method": "ponderlm", "options": {"steps": 2}}, recipe)
    engine, said = _engine(cfg), []
    check_fp8(cfg, engine, _batches(0), said.append)
    gradients = float(_gradient(engine).abs().max())
    cfg.precision.fp8_canary = 1e-12
    try:
        check_fp8(cfg, engine, _batches(0), said.append)
        refused = ""
    except UserError as error:
        refused = str(error)
    return {"said": said, "refused": refused, "gradients": gradients}


def fp8_amax() -> dict[str, Any]:
    """What the amax metrics say after two steps, and the largest weight; before any step; with another recipe."""
    engine = _engine(_case({"family": "llama", "method": "loop", "options": {"extra_passes": 1}}, "delayed"))
    before = engine.fp8_amax()
    for step in range(2):
        engine.zero_grad()
        engine.forward_backward(_batches(step), step, train=True)
    weights = max(float(m.weight.abs().max()) for m in engine.stage.fp8._modules.values())
    other = _engine(_case({"family": "llama", "method": "vanilla"}, "current"))
    other.forward_backward(_batches(0), 0, train=True)
    return {"before": before, "after": engine.fp8_amax(), "weights": weights, "other": other.fp8_amax()}


def train(jobs: list[dict[str, Any]]) -> None:
    """Several runs one after another, several ranks on one GPU where there are not enough."""
    from tests.training.workers import run_many

    one_card.share()
    run_many(jobs)


def whole_command(job: dict[str, Any], compiled: str) -> int:
    """Exit code of `megaponder train`, which leaves the process groups at its end.

    What is compiled goes to a folder of this run, as on a machine's first run: compilation is what captures fear.
    """
    import os
    import warnings

    from tests.training.workers import run_train

    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": compiled, "TRITON_CACHE_DIR": f"{compiled}/triton"}
    warnings.filterwarnings("error", message=".*cannot be captured")
    one_card.share()
    return run_train(**job)
