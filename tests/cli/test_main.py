"""The command line: help that teaches, one sentence for a mistake, exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaponder.cli import report
from megaponder.cli.main import COMMANDS, main
from megaponder.errors import UserError
from tests import forks
from tests.distributed import run_workers

ROOT = Path(__file__).parents[2]
RUN = "model: {preset: llama-125m}\nponder: {method: loop}\ntrain: {steps: 10}\n"
FP8_ON_BLACKWELL = "--precision.fp8", "mxfp8", "--precision.dtype", "bf16"


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a mistake."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pln"], "did you mean plan"),
        (["zzz"], "choose from demo, prepare, plan"),
        (["--nonsense"], "unknown argument --nonsense"),
        (["train"], "CONFIG is missing"),
        (["train", "none.yaml"], "there is no such file"),
        (["train", "RUN", "--lr", "3"], "did you mean --optimizer.lr"),
        (["train", "RUN", "--batch_size", "3"], "did you mean --train.global_batch"),
        (["train", "RUN", "--precision", "bf16"], "its fields are: --precision.dtype"),
        (["train", "RUN", "--optimizer.lrr", "3"], "did you mean --optimizer.lr"),
        (["train", "RUN", "--train.steps", "x"], "it must be an integer"),
        (["plan", "RUN", "--ponder.method", "lop"], "there is no such method; did you mean loop? known"),
        (["plan", "RUN", "--ponder.options.stepz", "3"], "loop has no such option"),
        (["plan", "RUN", "--ponder.options.drawto", "3"], "loop has no such option; did you mean draw_to? its options"),
        (["train", "RUN"], "data.train"),
        (["train", "RUN", "--data.train", "nowhere/x"], "nowhere/x"),
        (["plan", "RUN", "--world-siz", "3"], "did you mean --world-size"),
        (["train", "RUN", "--train.steps", "5", "--profile", "3"], "--profile = 3: it takes no value"),
        (["train", "RUN", "--profile", "3"], "--logging.profile_steps chooses the steps (see"),
        (["train", "RUN", "--profile=3"], "--profile = 3: it takes no value; its meaning: write a profiler trace"),
        (["train", "RUN", "--train.steps", "5", "3", "--profile"], "--train.steps = '5 3': it takes one value"),
        (["plan", "RUN", "--world-size", "two"], "--world-size = two: it must be an integer; omit it"),
        (["plan", "RUN", "--world-size", "1e3"], "--world-size = 1e3: it must be an integer; the nearest is 1000"),
        (["plan", "RUN", "--world-size", "inf"], "--world-size = inf: it must be an integer; omit it"),
        (["plan", "RUN", "--world-size"], "--world-size: it needs a value; write --world-size N"),
        (["plan", "RUN", "--mfu", "half"], "--mfu = half: it must be a number; the default is 0.4"),
        (["plan", "RUN", "--gpu"], "--gpu: it needs a value; choose from h100-sxm, h100-pcie"),
        (["plan", "RUN", "--gpu", "H200"], "did you mean h200"),
        (["plan", "RUN", "--gpu", "h100"], "--gpu = h100: there is no such choice; choose from h100-sxm, h100-pcie"),
        (
            ["plan", "RUN", *FP8_ON_BLACKWELL],
            "h100-sxm, for which this plan is by default, has 9.0; the nearest is "
            "blockwise, or another GPU: --gpu b200.",
        ),
        (
            ["plan", "RUN", *FP8_ON_BLACKWELL, "--gpu", "l40s"],
            "and l40s, for which this plan is, has 8.9; the nearest is current, or another GPU: --gpu b200.",
        ),
        (["plan", "RUN", "--gpu", "a'b"], "--gpu = a'b: there is no such choice; choose from h100-sxm"),
        (["inspect"], "the following arguments are required: PATH"),
        (["plan", "RUN", "--world-size", "0"], "it must be at least 1"),
        (["plan", "RUN", "--mfu", "1.5"], "--mfu = 1.5: it must be more than 0"),
        (["plan", "RUN", "--gpu", "h100-smx"], "did you mean h100-sxm"),
        (["plan", "RUN", "--parallel.tensor", "5"], "the nearest is 4"),
        (["plan", "RUN", "--world-size", "3"], "the nearest is 255"),
        (["inspect", "nowhere/pile"], "neither a dataset"),
        (["export"], "the following arguments are required"),
        (["export", "a", "b", "--dtpe", "x"], "did you mean --dtype"),
        (["export", "nowhere/run", "out"], "nowhere/run"),
        (["import", "nowhere/hf", "out"], "nowhere/hf"),
        (["generate", "nowhere/run", "text"], "nowhere/run"),
        (["prepare", "nowhere.txt", "--tokenizer", "bytes", "--output", "x"], "nowhere.txt"),
        (["prepare", "RUN", "--tokenizer", "bytes", "--output", ""], "OUTPUT is empty"),
        (["prepare", "RUN", "--tokenizer", "bytes", "--output", "data/"], "ends in a dataset's name; use data/text"),
        (["prepare", "RUN", "--tokenizer", "bytes", "--output", ".."], "ends in a dataset's name"),
        (["generate", "", "text"], "MODEL is empty"),
        (["import", "RUN", ""], "OUT is empty"),
        (["inspect", ""], "PATHS is empty"),
        (["watch", "RUN"], "this is not a run folder"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], expected: str, run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refused([run_file if w == "RUN" else w for w in words], capsys)


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"] if command else ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 125
    if command:
        assert "examples" in text or "megaponder train" in text or "What happens" in text
    else:
        assert all(f"\n    {name} " in text for name in COMMANDS)


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "first steps" in capsys.readouterr().out


def test_fields_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    from megaponder.config.fields import all_fields

    assert main(["train", "--fields"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} = " in text for name in all_fields())
    assert "[start, increment, sequences]" in text


def test_plan(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", run_file, "--world-size", "16", "--parallel.tensor", "2", "--ponder.options.extra_passes=1"]) == 0
    )
    text = capsys.readouterr().out
    assert "16 = tensor 2 x pipeline 1 x data 8" in text and "2 passes each" in text
    assert main(["plan", run_file, "--json", "--train.steps", "7"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["steps"] == 7


def test_plan_knows_what_its_gpu_can_do(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", run_file, "--precision.dtype", "bf16", "--precision.fp8"]
    assert "and a100-80gb, for which this plan is, has 8.0" in refused(
        [*command, "delayed", "--gpu", "a100-80gb"], capsys
    )
    assert "the nearest is current" in refused([*command, "blockwise", "--gpu", "l40s"], capsys)
    assert "10.0 (Blackwell) or newer, and h200, for which this plan is, has 9.0; the nearest is blockwise" in refused(
        [*command, "mxfp8", "--gpu", "h200"], capsys
    )
    for recipe, gpu in (("current", "l40s"), ("blockwise", "h200"), ("nvfp4", "b200")):
        assert main([*command, recipe, "--gpu", gpu]) == 0


def test_plan_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--presets"]) == 0
    assert "pythia-2.8b" in capsys.readouterr().out
    assert main(["plan", "--methods"]) == 0
    text = capsys.readouterr().out
    assert "ponderlm" in text and "multiply_by_steps = False" in text


def test_plan_needs_a_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: {family: llama, num_layers: 2, hidden_size: 64, num_heads: 4}\ntrain: {steps: 1}\n")
    assert "model.vocab_size" in refused(["plan", str(path)], capsys)
    assert main(["plan", str(path), "--model.vocab_size", "1000"]) == 0


def test_plan_looks_at_datasets_that_are_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.data_pipeline.make import random_documents, write_documents

    prefix = write_documents(tmp_path / "wiki", random_documents([500, 900]))
    path = tmp_path / "own.yaml"
    path.write_text(
        "model: {family: llama, num_layers: 2, hidden_size: 64, num_heads: 4}\n"
        f"data: {{train: [{prefix}], sequence_length: 16}}\ntrain: {{steps: 1}}\n"
    )
    words = refused(["plan", str(path), "--model.vocab_size", "2"], capsys)
    assert "model.vocab_size = 2" in words and "contains token id" in words
    assert main(["plan", str(path), "--model.vocab_size", "2", "--data.train", "cluster/pile"]) == 0


def test_what_is_in_the_way_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder or file under a name that a command needs."""
    text, output = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("some words\n\nmore words")
    for suffix in (".bin", ".json"):
        (tmp_path / f"out{suffix}").mkdir()
        words = refused(["prepare", str(text), "--tokenizer", "bytes", "--output", str(output), "--overwrite"], capsys)
        assert f"{output}{suffix}: there is a folder where a file should be" in words
        (tmp_path / f"out{suffix}").rmdir()


def answers(lines: list[list[str]]) -> list[tuple[int, str]]:
    """In a worker without a launcher: exit code of each command, and what it wrote to stderr."""
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    found = []
    for words in lines:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            found.append((main(words), err.getvalue()))
    return found


def test_what_is_in_the_way_of_a_run_is_named(tmp_path: Path) -> None:
    from tests.data_pipeline.make import random_documents, write_documents

    prefix = write_documents(tmp_path / "wiki", random_documents([500, 900]))
    (tmp_path / "own.yaml").write_text(
        "model: {family: llama, num_layers: 1, hidden_size: 8, num_heads: 1, vocab_size: 100}\n"
        f"data: {{train: [{prefix}], sequence_length: 16, split: '1,0,0', eod_id: 0}}\n"
        "train: {steps: 1, micro_batch: 1, global_batch: 1, eval_batches: 0}\n"
    )
    (tmp_path / "config.yaml" / "config.yaml").mkdir(parents=True)
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "ranks").touch()
    expected = {
        "config.yaml": "there is a folder where a file should be",
        "ranks": "there is a file where a folder should be",
    }
    lines = [["train", str(tmp_path / "own.yaml"), "--run", str(tmp_path / name)] for name in expected]
    ended = run_workers("tests.cli.test_main:answers", 1, args={"lines": lines}, timeout=600)[0]
    for (code, words), (name, sentence) in zip(ended, expected.items(), strict=True):
        assert code == 2, words
        assert f"error: {tmp_path / name / name}: {sentence}; move it away" in words and "Traceback" not in words


def test_inspect_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.data_pipeline.make import describe, random_documents, write_documents

    prefix = write_documents(tmp_path / "wiki", random_documents([5, 9]))
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        assert main(["inspect", path]) == 0
        text = capsys.readouterr().out
        assert "2 documents, 14 tokens" in text and "5 to 9 tokens" in text and "another tool" in text
    describe(prefix, 2, 14, dtype="uint16", skipped={"empty": 3}, special_tokens={"<eod>": 0, "<pad>": 7})
    assert main(["inspect", prefix]) == 0
    text = capsys.readouterr().out
    assert "vocabulary 100, EOD 0" in text and "skipped 3 documents: empty" in text
    assert "special tokens <eod> 0, <pad> 7" in text
    assert "did you mean" in refused(["inspect", str(tmp_path / "wikk")], capsys)


@pytest.mark.parametrize("suffix", [".idx", ".json"])
def test_inspect_names_the_file_that_is_a_pipe(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.data_pipeline.make import write_documents

    prefix = write_documents(tmp_path / "set", [[1, 2]])
    Path(prefix + suffix).unlink(missing_ok=True)
    os.mkfifo(prefix + suffix)
    assert f"{prefix}{suffix} is a pipe or a device" in refused(["inspect", prefix], capsys)


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("megaponder.cli.plan.run", stop)
    assert main(["plan", "--presets"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise ValueError("a bug")

    monkeypatch.setattr("megaponder.cli.plan.run", fail)
    with pytest.raises(ValueError, match="a bug"):
        main(["plan", "--presets"])


def test_under_a_launcher_one_process_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        report.report_error("the same")
    report.report_error("another")
    assert capsys.readouterr().err == "error: the same\nerror: another\n"
    # the marker of an earlier launch, whose process id came back, does not silence this one
    for marker in tmp_path.iterdir():
        old = time.time() - report.STALE_SECONDS - 1
        os.utime(marker, (old, old))
    monkeypatch.setenv("GROUP_RANK", "1")
    report.report_error("the same")
    assert capsys.readouterr().err == f"error on {os.uname().nodename}: the same\n"


def python(
    *words: str, env: dict[str, str] | None = None, program: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | (env or {}),
    )  # fmt: skip


def test_as_a_module_and_in_a_pipe(run_file: str) -> None:
    done = python("-m", "megaponder", "plan", run_file, "--optimizer.lr", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: optimizer.lr = 5.0: it must be more than 0 and at most 1; the nearest is 1.\n"
    shell = f"{sys.executable} -m megaponder train --fields | head -1; echo ${{PIPESTATUS[0]}}"
    piped = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert piped.stderr == "" and piped.stdout.endswith("\n0\n")


def test_starting_needs_neither_torch_nor_megatron() -> None:
    code = "import sys; from megaponder.cli.main import parse; parse(['plan', 'x.yaml']); parse(['train', 'x.yaml']);"
    code += "import megaponder.config.rules, megaponder.plan.build, megaponder.plan.report;"
    code += "sys.exit(', '.join({'torch', 'megatron', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_torchrun_prints_one_error(tmp_path: Path, run_file: str) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megaponder"]
    env = {"TMPDIR": str(tmp_path), "PYTHON_EXEC": forks.python()}  # it and its two processes are forked
    done = python(*launch, "train", run_file, "--parallel.tensor", "5", env=env, program=forks.python())
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert len(lines) == 1, done.stderr
    # torchrun's own traceback says that a process failed; none of ours may be in it
    assert f'File "{ROOT / "megaponder"}' not in done.stderr


def test_user_errors_are_one_line_each() -> None:
    assert "\n" not in str(UserError("x"))
