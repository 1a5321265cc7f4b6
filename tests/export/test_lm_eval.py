"""lm-eval on an export: log-likelihoods are those of the model itself, whatever the batch; it generates as well."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megaponder.config.schema import DataConfig, ModelConfig, RunConfig
from megaponder.export import tokenizer
from megaponder.export.modeling_megaponder import MegaponderConfig, MegaponderForCausalLM
from tests.export import models

TEXTS = ["ponder", "one text is longer than the others", "a", "two  spaces", "and then it ends"]
TASKS = {
    "rolling": {"output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}", "metric": "bits_per_byte"},
    "choice": {"output_type": "multiple_choice", "doc_to_choice": ["er", " more"], "doc_to_target": 0, "metric": "acc"},
    "words": {"output_type": "generate_until", "doc_to_target": "x", "metric": "exact_match"},
}


def _write_tasks(folder: Path) -> None:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    for name, fields in TASKS.items():
        task: dict[str, Any] = {k: v for k, v in fields.items() if k != "metric"}
        task |= {
            "task": name, "dataset_path": "json", "validation_split": "validation",
            "dataset_kwargs": {"data_files": {"validation": str(folder / "texts.jsonl")}},
            "doc_to_text": "" if name == "rolling" else "{{text}}", "metric_list": [{"metric": fields["metric"]}],
            "generation_kwargs": {"until": ["\\n"], "max_gen_toks": 5},
        }  # fmt: skip
        if name != "words":
            del task["generation_kwargs"]
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML, too


def _evaluate(folder: Path, batch: int) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", ",".join(TASKS), "--include_path", str(folder),
        "--model_args", f"pretrained={folder / 'model'},trust_remote_code=True,dtype=float32",
        "--device", "cpu", "--batch_size", str(batch), "--output_path", str(folder / f"out{batch}"), "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(command, cwd=folder, env=os.environ | offline, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in TASKS:
        [path] = (folder / f"out{batch}").rglob(f"samples_{name}_*.jsonl")
        samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda s: s["doc_id"])
        found[name] = [s["resps"] for s in samples]
    return found


@pytest.mark.parametrize("method", ["adaponderlm", "ponderlm3"])
def test_log_likelihoods_are_the_models_own(tmp_path: Path, method: str) -> None:
    pytest.importorskip("lm_eval", reason="the extra megaponder[eval] is not installed")
    net = models.model("llama", method, vocab_size=257, eos_token_id=256, bos_token_id=256).float()
    MegaponderConfig.register_for_auto_class()
    MegaponderForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    net.save_pretrained(tmp_path / "model")  # with the modelling file
    cfg = RunConfig(model=ModelConfig(vocab_size=257, max_positions=64), data=DataConfig(tokenizer="bytes", eod_id=256))
    tokenizer.write(cfg, tmp_path / "model", None)
    _write_tasks(tmp_path)
    alone, together = _evaluate(tmp_path, 1), _evaluate(tmp_path, 3)
    for text, got, batched in zip(TEXTS, alone["rolling"], together["rolling"], strict=True):
        ids = torch.tensor([[256, *text.encode()]])  # an evaluation begins with the end-of-document token
        with torch.no_grad():
            logits = net(ids).logits[0, :-1].log_softmax(-1)
        own = float(logits.gather(1, ids[0, 1:, None]).sum())
        for value in (got, batched):
            assert float(value[0][0]) == pytest.approx(own, rel=1e-4), text
        assert math.isfinite(own)
    for text, got, batched in zip(TEXTS, alone["choice"], together["choice"], strict=True):
        for (one,), (other,), choice in zip(got, batched, ("er", " more"), strict=True):
            assert float(one[0]) == pytest.approx(float(other[0]), rel=1e-4), (text, choice)
    assert alone["words"] == together["words"] and any(words[0][0] for words in alone["words"])


def test_tasks_of_a_run_of_its_export_and_in_the_loop_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra megaponder[eval] is not installed")
    _write_tasks(tmp_path)
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{t} {t}"}) + "\n" for t in TEXTS * 4))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}

    def call(*words: str) -> None:
        command = [sys.executable, "-m", "megaponder", *words]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | offline, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]

    call("prepare", "text.jsonl", "--tokenizer", "bytes", "--output", "data")
    (tmp_path / "run.yaml").write_text("model: {family: llama, num_layers: 1, hidden_size: 16, num_heads: 2}\n")
    train = ["--train.steps", "3", "--train.global_batch", "2", "--train.eval_batches", "0", "--optimizer.lr", "0.01"]
    data = ["--data.train", "data", "--data.sequence_length", "16", "--data.tokenizer", "bytes"]
    tasks = ["--train.tasks", "rolling", "--train.tasks_folder", str(tmp_path), "--train.tasks_every", "2"]
    call(
        "train",
        "run.yaml",
        "--run",
        "run",
        *train,
        *data,
        *tasks,
        "--model.max_positions",
        "64",
        "--logging.every",
        "1",
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told = {row["step"]: row["task_rolling_bits_per_byte"] for row in rows if "task_rolling_bits_per_byte" in row}
    assert list(told) == [2, 3] and told[2] != told[3]
    call("export", "run", "hf")
    for path in ("run", "hf"):
        call("eval", path, "--tasks", "rolling", "--tasks-folder", str(tmp_path), "--json", f"{path}.json")
        [values] = json.loads((tmp_path / f"{path}.json").read_text())["tasks"].values()
        assert values["bits_per_byte,none"] == pytest.approx(told[3], rel=1e-5), path
