"""What models of several widths compute before and after some steps, in a worker process."""

from __future__ import annotations

from typing import Any

HEAD_SIZE, VOCAB, TUNED = 8, 64, 32


def configured(width: int, method: str, options: dict[str, Any], **optimizer: Any) -> Any:
    """Two layers of this width with heads of HEAD_SIZE."""
    from megaponder.config.load import from_mapping
    from megaponder.config.resolve import resolve

    model = {
        "family": "llama", "num_layers": 2, "hidden_size": width, "num_heads": width // HEAD_SIZE, "vocab_size": VOCAB,
        "ffn_size": 2 * width, "vocab_multiple": 32,
    }  # fmt: skip
    return resolve(
        from_mapping(
            {
                "model": model,
                "ponder": {"method": method, "options": options},
                "data": {"sequence_length": 16},
                "optimizer": {"weight_decay": 0.0, **optimizer},
                "train": {"steps": 10, "global_batch": 8, "micro_batch": 8},
                "precision": {"implementation": "local"},
            }
        )
    )


def coordinates(cfg: Any, lr: float, steps: int) -> dict[str, Any]:
    """Root mean squares of states and logits at the start, and of their change after `steps`; the groups' rates."""
    import torch

    from megaponder.data.batch import MicroBatch
    from megaponder.engine import groups as engine_groups
    from megaponder.ponder.settings import method_of
    from megaponder.training import engines
    from megaponder.training.optimizer import set_lr
    from megaponder.training.step import gradient_norm, update

    groups = engine_groups.init(cfg)
    engine, optimizer = engines.build(cfg, method_of(cfg), groups)
    text = torch.randint(0, VOCAB, (8, 17), generator=torch.Generator().manual_seed(5))
    batch = MicroBatch(text[:, :-1], text[:, 1:], torch.ones(8, 16))
    seen: dict[str, torch.Tensor] = {}
    stage = engine.stage
    stage.decoder.layers[-1].register_forward_hook(lambda m, i, out: seen.update(states=out[0].detach().clone()))
    stage.output_layer.register_forward_hook(lambda m, i, out: seen.update(logits=out[0].detach().clone()))

    def look() -> dict[str, torch.Tensor]:
        engine.forward_backward([batch], 0, train=False)
        return dict(seen)

    before = look()
    stds = {name: float(p.detach().float().std()) for name, p in stage.named_parameters() if p.dim() > 1}
    for step in range(1, steps + 1):
        engine.zero_grad()
        optimizer.zero_grad()
        engine.forward_backward([batch], step, train=True)
        set_lr(optimizer, cfg, lr, step)
        update(optimizer, gradient_norm(optimizer))
    after = look()
    named = {id(p): name for name, p in stage.named_parameters()}
    rates = {named[id(p)]: g["lr"] / lr for g in optimizer.param_groups for p in g["params"]}
    decays = {named[id(p)]: g["lr"] * g["wd_mult"] / lr for g in optimizer.param_groups for p in g["params"]}
    size = {f"{name} at the start": float(x.square().mean().sqrt()) for name, x in before.items()}
    size |= {f"change of {name}": float((after[name] - x).square().mean().sqrt()) for name, x in before.items()}
    engine.close()
    return {"size": size, "std": stds, "rates": rates, "decays": decays}


def all_of(cases: dict[str, dict[str, Any]], widths: list[int], lr: float, steps: int) -> dict[str, list[Any]]:
    """Of each case and width, with and without the option."""
    import torch

    from megaponder.engine.cuda_on_cpu import install

    torch.set_num_threads(1)
    install()
    return {
        name: [coordinates(configured(width, **case), lr, steps) for width in widths] for name, case in cases.items()
    }
