"""Does a method hold its budget?  Trains a small model in one process (two layers of 64, 1,024 tokens a step) and
prints a line of JSON: passes in the mean of the last 200 steps, how far the mean of any 200 steps after the ramp is
off, passes and loss on held-out text, and the loss with as many passes spread at random.

    python -m benchmarks.budgets adaponderlm 0.6 --data PREFIX --steps 400 --seed 1

PREFIX is a dataset of `megaponder prepare`; its last twentieth is held out.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch

from benchmarks.command import number, parser, script
from megaponder.engine import cuda_on_cpu

LENGTH, BATCH, LR = 64, 16, 3e-3
OPTIONS: dict[str, dict[str, Any]] = {
    "adaponderlm": {"steps": 3},
    "adaptive_cot": {"steps": 3},
    "confident_ponderlm": {"steps": 3},
    "ponderlm3": {"latents": 2, "jacobi": 1},
}
DEEPEST = {"adaponderlm": 4, "adaptive_cot": 4, "confident_ponderlm": 4, "ponderlm3": 3}


@script
def main(argv: list[str] | None = None) -> int:
    args = parser("budgets", __doc__)
    args.add_argument("method", choices=sorted(OPTIONS))
    args.add_argument("target", type=number(0.05), help="share of passes")
    args.add_argument("--data", required=True)
    args.add_argument("--steps", type=number(250), default=400)
    args.add_argument("--seed", type=number(0), default=1)
    args.add_argument("--explore", type=number(0.0), default=0.1)
    found = args.parse_args(argv)
    print(json.dumps(measure(found.method, found.target, found.data, found.steps, found.seed, found.explore)))
    return 0


def measure(method: str, target: float, data: str, steps: int, seed: int, explore: float) -> dict[str, Any]:
    """The numbers of one row."""
    cuda_on_cpu.install()
    from megaponder.config.resolve import resolve
    from megaponder.config.schema import ModelConfig, RunConfig
    from megaponder.data.batch import MicroBatch
    from megaponder.data.indexed import read_index
    from megaponder.engine import groups
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    torch.set_num_threads(1)
    tokens = torch.from_numpy(np.fromfile(f"{data}.bin", dtype=read_index(data).dtype).astype("int64"))
    split = len(tokens) * 19 // 20
    cfg = RunConfig(
        model=ModelConfig(
            family="llama", num_layers=2, hidden_size=64, num_heads=2, ffn_size=172, vocab_size=int(tokens.max()) + 1,
            max_positions=LENGTH,
        )
    )  # fmt: skip
    ramp = {"ramp_start": steps // 10, "ramp_end": 4 * steps // 10}
    cfg.ponder.method = method
    cfg.ponder.options = {**OPTIONS[method], "target": target, "explore": explore, **ramp}
    cfg.data.sequence_length, cfg.train.steps, cfg.train.seed = LENGTH, steps, seed
    cfg.train.global_batch = cfg.train.micro_batch = BATCH
    cfg = resolve(cfg)
    model = method_of(cfg)
    engine = build_engine(cfg, model, groups.init(cfg))
    trained = [p for p in engine.stage.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), weight_decay=0.1)

    def batch(text: torch.Tensor, draw: torch.Generator) -> MicroBatch:
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=draw).tolist()
        rows = torch.stack([text[i : i + LENGTH + 1] for i in starts])
        return MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.ones(BATCH, LENGTH))

    def evaluate() -> tuple[float, float]:
        draw = torch.Generator().manual_seed(9)
        outs = [engine.forward_backward([batch(tokens[split:], draw)], 0, train=False) for _ in range(16)]
        return sum(o.loss for o in outs) / 16, sum(o.stats["depth"] for o in outs) / 16

    draw, wanted, ran = torch.Generator().manual_seed(seed), [], []
    for step in range(1, steps + 1):
        rate = LR * min(1, 20 * step / steps) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        engine.zero_grad()
        out = engine.forward_backward([batch(tokens[:split], draw)], step, train=True)
        for p in trained:
            p.grad = p.main_grad.clone()  # type: ignore[attr-defined]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        engine.settle(out, step)
        wanted.append(out.stats["wanted_depth"])
        ran.append(out.stats["depth"])
    budget, since = target * DEEPEST[method], wanted[ramp["ramp_end"] :]
    means = [sum(since[i : i + 200]) / 200 for i in range(len(since) - 199)]
    loss, depth = evaluate()
    row = {
        "method": method, "target": target, "budget": budget, "seed": seed, "explore": explore,
        "wanted": sum(wanted[-200:]) / 200, "worst": max((abs(m - budget) for m in means), default=math.nan),
        "ran": sum(ran[-200:]) / 200, "held_out": depth, "loss": loss,
    }  # fmt: skip
    if model.window is not None and model.window.gates == 1:
        model.at_random = [depth - model.window.least]
        row["loss_at_random"], row["held_out_at_random"] = evaluate()
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}


if __name__ == "__main__":
    raise SystemExit(main())
