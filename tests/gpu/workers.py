"""What the GPU tests run in a process of their own."""

from __future__ import annotations

from typing import Any

from megaponder.config.resolve import resolve
from megaponder.config.schema import ModelConfig, RunConfig


def config(family: str, method: str, options: dict[str, Any], implementation: str, dtype: str) -> RunConfig:
    """A small model with sizes that the fused kernels accept."""
    model = ModelConfig(
        family=family,  # type: ignore[arg-type]
        num_layers=4,
        hidden_size=256,
        num_heads=4,
        ffn_size=512,
        vocab_size=1000,
        init_std=0.05,
    )
    cfg = RunConfig(model=model)
    cfg.ponder.method, cfg.ponder.options = method, options
    cfg.data.sequence_length, cfg.train.steps, cfg.train.global_batch, cfg.train.micro_batch = 128, 1, 8, 4
    cfg.precision.implementation, cfg.precision.dtype = implementation, dtype  # type: ignore[assignment]
    return resolve(cfg)


def compare_implementations(family: str, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of PyTorch's layers in FP32 and of both implementations in BF16, on equal weights."""
    import torch

    from megaponder.backbone.init import global_names
    from megaponder.data.batch import MicroBatch
    from megaponder.engine import groups
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    draw = torch.Generator().manual_seed(5)
    text = torch.randint(0, 1000, (8, 129), generator=draw)
    batches = [MicroBatch(t[:, :-1], t[:, 1:], torch.ones(4, 128)) for t in text.split(4)]
    out: dict[str, Any] = {}
    for name, implementation, dtype in (("fp32", "local", "fp32"), ("local", "local", "bf16"), ("te", "te", "bf16")):
        cfg = config(family, method, options, implementation, dtype)
        engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
        engine.zero_grad()
        step = engine.forward_backward(batches, 0, train=True)
        grads = {_plain(k): p.main_grad.float().flatten().double().cpu() for k, p in global_names(engine.stage)}
        out[name] = {"loss": step.loss, "grad": torch.cat([grads[k] for k in sorted(grads)])}
    return {
        "loss": {k: v["loss"] for k, v in out.items()},
        "error": {
            k: float((v["grad"] - out["fp32"]["grad"]).norm() / out["fp32"]["grad"].norm()) for k, v in out.items()
        },
        "params": {k: v["grad"].numel() for k, v in out.items()},
    }


def _plain(name: str) -> str:
    """Transformer Engine's names of fused norms -> those of separate norms."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
