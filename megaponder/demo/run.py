"""`megaponder demo`: the whole workflow in small, in a few minutes on two cores and without a download."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from rich.console import Console

from megaponder.config.load import load_config
from megaponder.config.schema import RunConfig
from megaponder.demo import corpus, curves
from megaponder.demo.commands import Command, relative, run_python
from megaponder.demo.tokenizer import train_tokenizer
from megaponder.errors import UserError
from megaponder.monitor import jsonl

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "demo.yaml"
MARKER = ".megaponder-demo"
"""File that marks a folder as made by the demo, which may replace it."""
STEPS = 9
CODE_BYTES = 900_000
PROMPT = "The import statement"
TWINS = {
    "vanilla": [],
    "matched": [
        "--model.embedding_scale",
        "sqrt_h",
        "--model.init",
        "trunc_normal",
        "--model.init_output_scale",
        "0.5",
    ],
}
"""Runs of plain models: as published, and with the embedding scale and the initialisation that PonderLM has."""

SAMPLE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
torch.manual_seed(1)
ids = tokenizer(prompt, return_tensors="pt").input_ids
text = model.generate(ids, max_new_tokens=40, do_sample=True, temperature=0.7, top_k=40)
print(tokenizer.decode(text[0]))
"""


def run_demo(folder: str | Path, quick: bool = False) -> int:
    """Data, tokenizer, training of a PonderLM and its vanilla twins, kill and resume, plot, export, text.

    `quick` does the same with fewer steps and less text: a check that everything works, with curves that mean little.
    Returns the exit code; UserError if a step fails or `folder` contains files that are not the demo's.
    """
    return Demo(Path(folder), quick).run()


class Demo:
    """One run of the demo in one folder."""

    def __init__(self, folder: Path, quick: bool):
        if not CONFIG.is_file():
            raise UserError(f"{CONFIG} is missing; the demo must be run from a checkout of the repository.")
        self.folder, self.quick = folder, quick
        self.console = Console()
        self.started = time.monotonic()
        self.number = 0

    def run(self) -> int:
        """All steps in order."""
        claim(self.folder)
        self.prepare_data()
        self.train()
        sentence = self.compare_and_export()
        self.sample()
        self.title("What the plot shows")
        self.console.print(sentence, highlight=False)
        minutes, seconds = divmod(round(time.monotonic() - self.started), 60)
        self.console.print(f"\nDone in {minutes} min {seconds} s.  Everything is in {relative(self.folder)}/.")
        return 0

    def title(self, text: str) -> None:
        """Heads a step."""
        self.number += 1
        elapsed = time.monotonic() - self.started
        self.console.rule(f"[bold]{self.number}/{STEPS} {text}[/]  [dim]{elapsed:.0f} s[/]", align="left")

    def prepare_data(self) -> None:
        """Two corpora, a tokenizer, two indexed datasets."""
        self.title("Text: this Python's standard library, as code and as documentation")
        with self.console.status("reading modules"):
            corpora = corpus.gather(self.folder / "text", CODE_BYTES // (10 if self.quick else 1))
        for name, path in corpora.items():
            self.console.print(f"{name}: {relative(path)}, {path.stat().st_size / 1e6:.1f} MB")
        self.title("Tokenizer: byte-level BPE on that text")
        vocab_size = load_config(CONFIG).model.vocab_size
        assert vocab_size is not None
        with self.console.status("training the tokenizer"):
            path = train_tokenizer(list(corpora.values()), self.folder / "tokenizer.json", vocab_size)
        self.console.print(f"{relative(path)}: {vocab_size} tokens")
        self.title("Indexed datasets")
        for name, source in corpora.items():
            output = relative(self.folder / "data" / name)
            words = ["prepare", relative(source), "--tokenizer", relative(path), "--output", output]
            Command(self.console, words).wait()

    def command(self, name: str, overrides: list[str]) -> list[str]:
        """The training command of a run; paths are given only where they differ from the configuration's."""
        words = ["train", relative(CONFIG), "--run", relative(self.folder / name), *overrides]
        data = [w for c in ("code", "docs") for w in ("0.5", relative(self.folder / "data" / c))]
        cfg = load_config(CONFIG)
        if [str(w) for w in cfg.data.train] != data:
            words += ["--data.train", *data, "--data.tokenizer", relative(self.folder / "tokenizer.json")]
        if self.quick:
            words += ["--train.steps", "12", "--train.eval_every", "4", "--train.eval_batches", "1"]
            words += ["--checkpoint.every", "6", "--logging.every", "1"]
        return words

    def train(self) -> None:
        """The pondering model and, meanwhile, its vanilla twins."""
        self.title("Training: PonderLM, killed half-way, beside vanilla, as published and matched")
        twins = {}
        try:
            for name, overrides in TWINS.items():
                command = self.command(name, ["--ponder.method", "vanilla", *overrides])
                twins[name] = Command(self.console, command, self.folder / f"{name}.log")
            self.train_with_a_kill()
            self.title("The vanilla twins: the ends of their logs")
            for name, twin in twins.items():
                twin.wait()
                for line in (self.folder / f"{name}.log").read_text().splitlines()[-2:]:
                    self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        finally:
            for twin in twins.values():
                twin.stop()

    def train_with_a_kill(self) -> None:
        """The pondering model, killed with SIGKILL after its first checkpoint, then continued by the same command."""
        command = self.command("ponderlm", [])
        run = self.folder / "ponderlm"
        cfg = load_config(CONFIG, command[2:])
        target = cfg.checkpoint.every + cfg.logging.every
        killed = Command(self.console, command).kill_when(lambda: reached(run, target, cfg))
        self.title("The same command again: it continues from the checkpoint")
        if not killed:
            self.console.print("It had finished before it could be killed, so there is nothing to continue.")
            return
        self.console.print("[red]Killed (SIGKILL).[/]")
        Command(self.console, command).wait()
        self.console.print(repeated_steps(run), highlight=False)

    def compare_and_export(self) -> str:
        """Plots the runs while exporting the pondering model; returns a summary of the plot."""
        self.title("Validation curves, and meanwhile the export to Hugging Face")
        plot = self.folder / "validation.png"
        export = Command(self.console, ["export", relative(self.folder / "ponderlm"), relative(self.folder / "hf")])
        told = compare(self.folder, plot)
        export.wait()
        self.console.print(f"plotted in {relative(plot)}")
        return told

    def sample(self) -> None:
        """Text from the exported model, by transformers."""
        self.title("A sample from transformers")
        run_python(self.console, SAMPLE, relative(self.folder / "hf"), PROMPT)


def claim(folder: Path) -> None:
    """An empty folder for the demo; an earlier demo is replaced, anything else is rejected."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose a folder for the demo.")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARKER).is_file():
            raise UserError(f"{folder} is not empty and was not made by the demo; choose another folder.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()


def reached(run: Path, step: int, cfg: RunConfig) -> bool:
    """Whether a run has logged `step` and has a complete checkpoint to resume from."""
    if not (run / "checkpoints" / f"step_{cfg.checkpoint.every:08}").is_dir():
        return False
    return any(row["step"] >= step for row in jsonl.read(run / jsonl.NAME))


def repeated_steps(run: Path) -> str:
    """Compares the steps that were trained twice: before the kill, and again after the resume."""
    before = {r["step"]: r["loss"] for r in jsonl.read(run / jsonl.SUPERSEDED) if "loss" in r}
    after = {r["step"]: r["loss"] for r in jsonl.read(run / jsonl.NAME) if "loss" in r}
    both = sorted(before.keys() & after.keys())
    if not both:
        return "No logged step was trained twice."
    largest = max(abs(before[s] - after[s]) for s in both)
    steps = ", ".join(f"{s}" for s in both)
    how = "exactly the same losses" if largest == 0 else f"losses that differ by up to {largest:.1e}"
    return f"Logged steps {steps} were trained twice, before the kill and after the resume, with {how}."


def compare(folder: Path, plot: Path) -> str:
    """Draws the validation curves of all runs; returns what they show."""
    pondering, matched, published = (
        curves.read_curve(title, folder / name, flops_per_token(folder / name))
        for title, name in (("PonderLM", "ponderlm"), ("matched vanilla", "matched"), ("vanilla", "vanilla"))
    )
    curves.plot([pondering, matched, published], plot)
    return curves.verdict(pondering, matched, published)


def flops_per_token(run: Path) -> float:
    """Needed training FLOPs per token of a run."""
    from megaponder.plan.flops import mean_needed
    from megaponder.ponder.settings import method_of

    cfg = load_config(run / "config.yaml")
    return mean_needed(cfg, method_of(cfg))
