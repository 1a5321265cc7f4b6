"""What decoding costs: by depth, against the memory's copy rate, and against the export in eager transformers.

    python -m benchmarks.decoding depth                                 on a CPU, 410M
    python -m benchmarks.decoding depth copy queue --sizes 1.4b 7b      on a GPU

depth   time and FLOPs saved where 30, 50 and 70 % of a token's passes are left out, in prompts and in decoding, and the
        bytes of keys and values; all rows alternate within a run; medians are shown, of what a round saves, too
copy    a model of four fixed passes, one text: bytes of weights read a second against the rate of a plain copy
queue   tokens a second of a queue of four batches, against the export's `generate` in transformers, batch after batch
speculate   greedy texts of trained runs (--runs), drafted by their early passes: tokens a round, and traversals of the
        layers a token, which is what a text costs where reading the weights bounds it, against those without drafts

But for `speculate`, the model has random weights; the depth of each token is set with `pruned_ponderlm`, so that it is
exact.  Writes decoding-<device>.{json,md} into the folder of results.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import add_output, number, parser, script, write
from benchmarks.report import origin
from megaponder.decoding.cache import PonderCache
from megaponder.export.modeling_megaponder import MegaponderConfig, MegaponderForCausalLM
from megaponder.inference.batching import DepthBatch
from megaponder.inference.fp8 import quantise
from megaponder.inference.generate import load
from megaponder.inference.speculate import speculate

SIZES = {
    "tiny": (2, 64, 4, 176),
    "410m": (24, 1024, 16, 2752),
    "1.4b": (24, 2048, 32, 5504),
    "7b": (32, 4096, 32, 11008),
}
"""Llama shapes: layers, width, heads, width of the MLP."""
DEPTHS = (4.0, 2.8, 2.0, 1.2)
"""Mean depths of four passes: none, 30, 50 and 70 % of them left out."""
HELD: dict[tuple[str, str, int], Any] = {}
"""Layers and head of the last size, which all methods share: they are compiled once."""
GPU = torch.cuda.is_available()
CPU_TIME = not GPU and torch.get_num_threads() == 1
"""With one thread, time is this process's own: others on the machine then disturb it less."""


def build(size: str, method: str, options: dict[str, Any], dtype: str, vocab: int) -> Any:
    """A Llama of random weights with the method."""
    layers, width, heads, inner = SIZES[size]
    config = MegaponderConfig(
        family="llama", method=method, method_options=options, vocab_size=vocab, hidden_size=width,
        num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner, embedding_scale=width**0.5,
        max_position_embeddings=4096,
    )  # fmt: skip
    held = (size, dtype, vocab)
    if held not in HELD:
        HELD.clear()
        torch.manual_seed(0)
        with torch.device("cuda" if GPU else "cpu"):
            net = MegaponderForCausalLM(config)
        net = net.to(torch.float32 if dtype == "fp32" else torch.bfloat16).eval()
        if dtype == "fp8":
            quantise(net)
        HELD[held] = net.model, net.lm_head
    with torch.device("meta"):
        net = MegaponderForCausalLM(config).eval()
    net.model, net.lm_head = HELD[held]
    return net


def timed(work: Callable[[], Any]) -> float:
    """Seconds, with the GPU's work ended."""
    if GPU:
        torch.cuda.synchronize()
    clock = time.process_time if CPU_TIME else time.perf_counter
    begin = clock()
    work()
    if GPU:
        torch.cuda.synchronize()
    return clock() - begin


def flops(net: Any, tokens: int, rows: float, keys: float) -> float:
    """Of `rows` row-passes of `tokens` tokens that read `keys` keys each; a mixture before each deeper pass."""
    c = net.config
    layer = 4 * c.hidden_size * c.num_attention_heads * c.head_size + 3 * c.hidden_size * c.intermediate_size
    attention = 2 * c.num_attention_heads * c.head_size * keys
    table = c.vocab_size * c.hidden_size
    return 2.0 * (rows * c.num_hidden_layers * (layer + attention) + (rows - tokens) * 2 * table + tokens * table)


def texts(count: int, shortest: int, longest: int, vocab: int) -> list[list[int]]:
    """Random prompts whose lengths differ."""
    draw = torch.Generator().manual_seed(1)
    lengths = [shortest + (5 * i) % (longest - shortest + 1) for i in range(count)]
    return [torch.randint(1, vocab, (n,), generator=draw).tolist() for n in lengths]


def by_depth(size: str, dtype: str, args: Any) -> Iterator[list[dict[str, Any]]]:
    """Prompts and decoding at each batch and depth, batch by batch."""
    nets = {DEPTHS[0]: build(size, "pruned_ponderlm", {"steps": 3, "depth": DEPTHS[0]}, dtype, args.vocab)}
    for depth in DEPTHS[1:]:
        nets[depth] = with_depth(nets[DEPTHS[0]], depth)
    for batch in args.batches:
        length = max(args.prompt // batch, 8)
        prompt = torch.tensor(texts(batch, length, length, args.vocab), device="cuda" if GPU else "cpu")
        works: dict[tuple[str, float], Callable[[], dict[str, float]]] = {}
        for depth, net in nets.items():
            if "prompt" in args.what:
                works["prompt", depth] = partial(read, net, prompt)
            if "decode" in args.what:
                engine = DepthBatch(net, rows=batch, tokens=max(256 if GPU else 0, args.new + 16))
                works["decode", depth] = partial(write_texts, engine, batch, args)
        times: dict[tuple[str, float], list[float]] = {key: [] for key in works}
        done: dict[tuple[str, float], dict[str, float]] = {}
        warm = list(works) if GPU else [key for key in works if key[1] == DEPTHS[-1]]
        for i, order in enumerate([warm, *[list(works)[:: 1 - 2 * (i % 2)] for i in range(args.rounds)]]):
            for key in order:
                spent = timed(partial(keep_result, done, key, works[key]))
                if i:
                    times[key].append(spent)
        rows = []
        for (what, depth), measured in times.items():
            whole, found = done[what, DEPTHS[0]], done[what, depth]
            saved = [1 - after / before for after, before in zip(measured, times[what, DEPTHS[0]], strict=True)]
            after = statistics.median(measured)
            rows.append(
                {"size": size, "dtype": dtype, "what": what, "batch": batch, "depth": found["rows"] / found["tokens"],
                 "halted": 1 - found["rows"] / whole["rows"], "seconds": after,
                 "tokens_s": found["tokens"] / after, "flops_saved": 1 - found["flops"] / whole["flops"],
                 "time_saved": statistics.median(saved), "bytes": found["bytes"], "needed_bytes": found["needed"]}
            )  # fmt: skip
            print(rows[-1], flush=True)
        yield rows


def keep_result(done: dict[Any, Any], key: Any, work: Callable[[], Any]) -> None:
    """Run `work` and note what it returns."""
    done[key] = work()


def with_depth(net: Any, depth: float) -> Any:
    """The same weights at another mean depth."""
    other = copy(net)
    other.ponder = copy(net.ponder)
    other.ponder.options = {**net.ponder.options, "depth": depth}
    return other


@torch.inference_mode()
def read(net: Any, ids: torch.Tensor) -> dict[str, float]:
    """A forward over prompts [b, n] that fills a cache."""
    cache = PonderCache(net.config.num_hidden_layers)
    net(ids, past_key_values=cache, logits_to_keep=1)
    c, slots = net.config, cache.slots
    assert slots is not None
    needed = slots.used * c.num_hidden_layers * 2 * c.num_key_value_heads * c.head_size * slots.pool[0].element_size()
    work = flops(net, ids.numel(), slots.used, ids.shape[1] / 2)
    return {"rows": slots.used, "tokens": ids.numel(), "flops": work, "bytes": slots.bytes, "needed": needed}


def write_texts(engine: DepthBatch, batch: int, args: Any) -> dict[str, float]:
    """Short prompts and `new` tokens after each, in a queue of two batches."""
    counts, before = engine.counts, (engine.counts.rows, engine.counts.prompt_rows)
    prompts = texts(2 * batch, 1, 8, args.vocab)
    found = engine.run(prompts, args.new)
    rows = sum(sum(x.depths) for x in found)
    assert rows <= counts.rows - before[0] + counts.prompt_rows - before[1]
    tokens = sum(len(x.depths) for x in found)
    slots = engine.slots
    each = slots.bytes / slots.keys[0].shape[0]
    return {
        "rows": rows, "tokens": tokens, "flops": flops(engine.model, tokens, rows, args.new / 2),
        "bytes": counts.most_pages * 16 * each, "needed": counts.most_slots * each,
    }  # fmt: skip


def copy_rate() -> float:
    """Bytes read and written a second by a copy within the device."""
    size = (1 << 32) if GPU else (1 << 28)
    a = torch.empty(size, dtype=torch.uint8, device="cuda" if GPU else "cpu").zero_()
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * size / min(timed(lambda: b.copy_(a)) for _ in range(5))


def against_copy(size: str, dtype: str, args: Any) -> dict[str, Any]:
    """One text of a model with four fixed passes."""
    rate = copy_rate()
    net = build(size, "loop", {"extra_passes": 3}, dtype, args.vocab)
    seconds = token_seconds(DepthBatch(net, rows=1, tokens=256), args)
    read = token_bytes(net)
    row = {"size": size, "dtype": dtype, "ms_a_token": 1e3 * seconds, "copy_tb_s": rate / 1e12,
           "read_tb_s": read / seconds / 1e12, "of_copy": read / seconds / rate}  # fmt: skip
    print(row, flush=True)
    return row


def token_seconds(engine: DepthBatch, args: Any) -> float:
    """Of decoding a token of one text, without its prompt: of a text of three times the tokens, what is more."""
    prompt = texts(1, 16, 16, args.vocab)
    engine.run(prompt, 3 * args.new)
    spent = {
        count: statistics.median(timed(partial(engine.run, prompt, count)) for _ in range(args.rounds))
        for count in (args.new, 3 * args.new)
    }
    return (spent[3 * args.new] - spent[args.new]) / (2 * args.new)


def token_bytes(net: Any) -> int:
    """Weights that a token of four passes reads: the layers four times, the head once."""
    layers = sum(x.numel() * x.element_size() for layer in net.model.layers for x in layer.state_dict().values())
    return 4 * layers + net.lm_head.weight.numel() * net.lm_head.weight.element_size()


def against_export(size: str, dtype: str, method: str, options: dict[str, Any], args: Any) -> dict[str, Any]:
    """Four batches of 32 prompts: in a queue here, and one batch after the other by the export's `generate`."""
    net, batch = build(size, method, options, dtype, args.vocab), max(args.batches)
    prompts = texts(4 * batch, 8, 24, args.vocab)
    engine = DepthBatch(net, rows=batch, tokens=256)
    engine.run(prompts, args.new)
    here = statistics.median(timed(lambda: engine.run(prompts, args.new)) for _ in range(args.rounds))
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=net.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=net.device)

    def batches(count: int) -> None:
        for i in range(0, count * batch, batch):
            net.generate(
                padded[i : i + batch], attention_mask=mask[i : i + batch], max_new_tokens=args.new, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip

    batches(1)
    there = timed(lambda: batches(4))
    new = len(prompts) * args.new
    row = {"size": size, "dtype": dtype, "method": method, "options": options, "batch": batch, "here": new / here,
           "export": new / there, "ratio": there / here}  # fmt: skip
    print(row, flush=True)
    return row


PROMPTS = (
    "import os", "def __init__(self, ", "class Error(Exception):", "The import statement", "Return a string that ",
    "for i in range(", "If the argument is ", "    return self._",
)  # fmt: skip
"""Of texts like those that the demo's models are trained on."""


def drafted(run: Path, args: Any) -> list[dict[str, Any]]:
    """A trained run's greedy texts without drafts, and with drafts of the first passes."""
    loaded = load(run, device="cuda" if GPU else "cpu")
    model, method = loaded.model.double(), loaded.model.ponder.stepwise()  # equal texts: no rounding decides a word
    prompts = loaded.tokenizer.encode_batch(list(PROMPTS))
    plain: list[Any] = []
    rows = []

    def write_plain() -> None:
        plain[:] = DepthBatch(model, rows=1, tokens=256).run(prompts, args.new)

    base = timed(write_plain) / sum(len(x.tokens) for x in plain)
    want = [x.tokens for x in plain]
    without = statistics.mean(d for x, p in zip(plain, prompts, strict=True) for d in x.depths[len(p) - 1 :])
    for by in range(1, method.deepest()):
        for count in (2, 4):
            made: list[Any] = []
            call = partial(speculate, model, most=args.new, drafted=count, by=by)
            seconds = timed(lambda made=made, call=call: made.extend(call(p) for p in prompts))  # type: ignore[misc]
            assert [x.tokens for x in made] == want, "the text with drafts differs"
            tokens = sum(len(x.tokens) for x in made)
            row = {"method": model.ponder.name, "by": by, "drafted": count, "without": without,
                   "a_round": tokens / sum(x.rounds for x in made), "ms": 1e3 * seconds / tokens,
                   "traversals": sum(x.traversals for x in made) / tokens, "ms_without": 1e3 * base}  # fmt: skip
            print(row, flush=True)
            rows.append(row)
    return rows


def table(found: dict[str, list[dict[str, Any]]], args: Any) -> str:
    """The Markdown report."""
    lines = [f"# Decoding by depth\n\n{origin()}. Llama shapes, vocabulary {args.vocab:,}, random weights.\n"]
    if rows := found["depth"]:
        clock = "" if GPU else f" ({torch.get_num_threads()} threads)"
        clock = " (CPU time of one thread)" if CPU_TIME else clock
        lines += [
            f"Four passes at most. Prompts: {args.prompt} tokens in all, through the exported model's forward. "
            f"Decoding: a queue of two batches of short prompts, {args.new} new tokens each. "
            f"Medians of {args.rounds} alternating rounds, of times and of what each round saves{clock}. "
            "K/V: bytes held against the sum of depths (in decoding: with pages of 16 slots).\n",
            "| model | | batch | depth | left out | tokens/s | FLOPs saved | time saved | time / FLOPs saved | K/V |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for r in rows:
            share = f"{r['time_saved'] / r['flops_saved']:.2f}" if r["flops_saved"] > 0.01 else ""
            lines.append(
                f"| {r['size']} {r['dtype']} | {r['what']} | {r['batch']} | {r['depth']:.2f} | {r['halted']:.0%} | "
                f"{r['tokens_s']:,.1f} | {r['flops_saved']:.1%} | {r['time_saved']:.1%} | {share} | "
                f"{r['bytes'] / r['needed_bytes']:.3f} |"
            )
        lines.append("")
    if rows := found["copy"]:
        lines += [
            "Four fixed passes (`loop`), decoding one text: weights read against a copy (bytes read and written).\n",
            "| model | ms a token | weights read TB/s | copy TB/s | share |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['size']} {r['dtype']} | {r['ms_a_token']:.2f} | {r['read_tb_s']:.2f} | {r['copy_tb_s']:.2f} | "
            f"{r['of_copy']:.2f} |"
            for r in rows
        ] + [""]
    if rows := found.get("speculate", []):
        lines += [
            f"Drafts by early passes: {len(PROMPTS)} prompts, {args.new} new tokens each, greedy; the texts are those "
            "without drafts. Traversals of the layers a token: for one token or for all that a round verifies.\n",
            "| method | passes that draft | drafted | tokens a round | traversals a token | without drafts | saved |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| `{r['method']}` | {r['by']} | {r['drafted']} | {r['a_round']:.2f} | {r['traversals']:.2f} | "
            f"{r['without']:.2f} | {1 - r['traversals'] / r['without']:.0%} |"
            for r in rows
        ] + [""]
    if rows := found["queue"]:
        lines += [
            f"A queue of four batches, {args.new} new tokens each, against the export's `generate` in transformers.\n",
            "| model | method | batch | tokens/s | export, eager | ratio |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['size']} {r['dtype']} | `{r['method']}` {r['options']} | {r['batch']} | {r['here']:,.0f} | "
            f"{r['export']:,.0f} | {r['ratio']:.2f} |"
            for r in rows
        ] + [""]
    return "\n".join(lines)


@script
def main(argv: list[str] | None = None) -> None:
    options = parser("decoding", __doc__)
    options.add_argument("parts", nargs="+", choices=("depth", "copy", "queue", "speculate"), help="what to measure")
    default = ["1.4b"] if GPU else ["410m"]
    options.add_argument("--sizes", nargs="+", choices=SIZES, default=default, help="models; a queue runs the first")
    formats = ("bf16", "fp8") if GPU else ("fp32", "bf16")
    options.add_argument("--dtypes", nargs="+", choices=formats, default=[formats[0]], help="formats of the layers")
    options.add_argument("--runs", nargs="*", type=Path, default=[], metavar="RUN", help="trained runs that speculate")
    kinds = ("prompt", "decode")
    options.add_argument("--what", nargs="+", choices=kinds, default=kinds, help="what `depth` measures; default: both")
    options.add_argument("--batches", nargs="+", type=number(1), default=[1, 8, 32], help="texts at once")
    for name, kind, value, what in (
        ("vocab", number(32), 50304, "vocabulary"),
        ("prompt", number(8), 4096 if GPU else 256, "tokens of all prompts together"),
        ("new", number(1), 64 if GPU else 8, "new tokens"),
        ("rounds", number(1), 3, "timed rounds"),
    ):
        options.add_argument(f"--{name}", type=kind, default=value, help=f"{what}; default: {value}")
    add_output(options)
    args = options.parse_args(argv)
    found: dict[str, list[dict[str, Any]]] = {"depth": [], "copy": [], "queue": [], "speculate": []}
    name = "decoding-cuda" if GPU else "decoding-cpu"
    if len(args.what) == 1:
        name += f"-{args.what[0]}"

    def keep(part: str, rows: list[dict[str, Any]]) -> None:
        found[part] += rows
        write(args.output, name, found, table(found, args))  # a run that is cut short leaves what it has
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()

    if "speculate" in args.parts:
        for run in args.runs:
            keep("speculate", drafted(run, args))
    for dtype in args.dtypes:
        if "copy" in args.parts:
            for size in args.sizes[1:]:
                keep("copy", [against_copy(size, dtype, args)])
            keep("copy", [against_copy(args.sizes[0], dtype, args)])
        if "depth" in args.parts:
            for batch in by_depth(args.sizes[0], dtype, args):
                keep("depth", batch)
        if "queue" in args.parts:
            for method, chosen in (("loop", {"extra_passes": 3}), ("pruned_ponderlm", {"steps": 3, "depth": 2.0})):
                keep("queue", [against_export(args.sizes[0], dtype, method, chosen, args)])


if __name__ == "__main__":
    sys.exit(main())
