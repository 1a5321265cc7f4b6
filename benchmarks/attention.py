"""Forms of the attention that adaptive methods need, forward and backward, side by side in one process.

    python -m benchmarks.attention

Key bias with a gradient (PonderLM-3): 8 more head channels and a plain causal kernel, against a full mask [n, n]
that carries the bias.  Several key sets (adaptive CoT): one fused causal call per set merged by log-sum-exp, against
one call under a mask [n, K n].  On a GPU in BF16 at the size of a 410M model, else in FP32 at a small size.  Every
pair's outputs and gradients are compared.  Writes attention-<device>.{json,md} into the folder of results.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command import add_output, number, parser, script, write
from benchmarks.report import origin
from megaponder.backbone import attention

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
TOKENS, BATCH, HEADS, SIZE = (2048, 4, 16, 64) if GPU else (512, 2, 4, 64)


def masked_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The bias in a full mask, which then needs a gradient."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    n = q.shape[2]
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    mask = bias.t()[:, None, None].to(q.dtype).expand(-1, -1, n, -1).masked_fill(hidden, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).permute(2, 0, 1, 3)


def masked_merged(core: attention.SdpaCore, *args: Any) -> Tensor:
    """The same call with the fused kernels out of reach."""
    possible, attention.fused_is_possible = attention.fused_is_possible, lambda q: False
    try:
        return core.merged(*args)
    finally:
        attention.fused_is_possible = possible


def timed(forms: dict[str, Callable[[], Tensor]], inputs: list[Tensor], rounds: int) -> dict[str, Any]:
    """Median milliseconds of forward and backward of each form, alternating, and their largest difference."""
    weight = torch.randn_like(next(iter(forms.values()))())
    times: dict[str, list[float]] = {name: [] for name in forms}
    results = {}
    for i in range(rounds + 3):
        for name, form in forms.items():
            begin = time.perf_counter()
            out = form()
            grads = torch.autograd.grad(out, inputs, weight)
            if GPU:
                torch.cuda.synchronize()
            if i >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))
            results[name] = [out, *grads]
    first, *others = results.values()
    worst = max(
        float((a.detach().float() - b.detach().float()).abs().max() / a.float().abs().max())
        for other in others
        for a, b in zip(first, other, strict=True)
    )
    return {"ms": {name: statistics.median(t) for name, t in times.items()}, "difference": worst}


@script
def main(argv: list[str] | None = None) -> None:
    options = parser("attention", __doc__)
    options.add_argument("--rounds", type=number(1), default=20, help="timed calls of each form; default: 20")
    add_output(options)
    args = options.parse_args(argv)
    torch.manual_seed(0)
    core = attention.SdpaCore()
    results = {}

    def leaf(rows: int) -> Tensor:
        return torch.randn(rows, BATCH, HEADS, SIZE, device=DEVICE, dtype=DTYPE, requires_grad=True)

    for slots in (2, 4):
        q, k, v = (leaf(slots * TOKENS) for _ in range(3))
        bias = (-torch.rand(slots * TOKENS, BATCH, device=DEVICE) * 9).requires_grad_()
        forms = {
            "augmented": lambda q=q, k=k, v=v, bias=bias: core(q, k, v, key_bias=bias),
            "mask": lambda q=q, k=k, v=v, bias=bias: masked_bias(q, k, v, bias),
        }
        results[f"key bias, {slots} rows a token"] = timed(forms, [q, k, v, bias], args.rounds)
    for sets in (2, 4):
        q, *rest = (leaf(TOKENS) for _ in range(2 * sets + 1))
        keys, values = rest[:sets], rest[sets:]
        alive = [None] + [torch.rand(TOKENS, BATCH, device=DEVICE) < 0.7 for _ in range(sets - 1)]
        forms = {
            "merged": lambda q=q, k=keys, v=values, a=alive: core.merged(q, k, v, a),
            "mask": lambda q=q, k=keys, v=values, a=alive: masked_merged(core, q, k, v, a),
        }
        results[f"{sets} key sets"] = timed(forms, [q, *rest], args.rounds)

    lines = [
        "# Attention of the adaptive methods\n",
        f"{origin()}, {str(DTYPE)[6:]}, {BATCH} x {TOKENS} tokens, {HEADS} heads of {SIZE}; forward and backward, "
        f"median of {args.rounds}.\n",
        "| case | form | ms | faster by | largest difference |",
        "|---|---|---|---|---|",
    ]
    for case, r in results.items():
        ours, other = r["ms"].values()
        for name, ms in r["ms"].items():
            ratio = f"{other / ours:.2f}x" if ms == ours else ""
            lines.append(f"| {case} | {name} | {ms:.2f} | {ratio} | {r['difference']:.1e} |")
    report = "\n".join(lines) + "\n"
    print(report)
    write(args.output, f"attention-{DEVICE}", results, report)


if __name__ == "__main__":
    sys.exit(main())
