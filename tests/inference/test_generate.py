"""Text from checkpoints and exports: the same from both, with and without cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from megaponder.cli.main import main
from megaponder.data import chat
from megaponder.data.template import of_text
from megaponder.data.tokenizer import load_tokenizer
from megaponder.errors import UserError
from megaponder.export.from_hf import import_hf
from megaponder.export.to_hf import export
from megaponder.inference.generate import generate
from tests.export import checkpoints

PROMPTS = ["The quick", "", "é"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ponderlm checkpoint over bytes."""
    folder = tmp_path_factory.mktemp("generate")
    data = {"tokenizer": "bytes", "eod_id": 256}
    checkpoints.make("pythia", "ponderlm", folder / "run", data=data, vocab_size=257)
    export(folder / "run", folder / "hf")
    return folder


def test_checkpoint_equals_export(run: Path) -> None:
    greedy = dict(max_new_tokens=8, temperature=0.0)
    want = generate(run / "run", PROMPTS, **greedy)
    assert [g.prompt for g in want] == PROMPTS and all(1 <= g.tokens <= 8 for g in want)
    assert generate(run / "hf", PROMPTS, **greedy) == want
    assert generate(run / "run" / "checkpoints" / "step_00000000", PROMPTS, use_cache=False, **greedy) == want
    assert [generate(run / "run", [p], **greedy)[0] for p in PROMPTS] == want  # padding changes nothing


def test_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """A run on conversations is asked in its template, and so is its export, by transformers too; it stops where an
    answer ends.  An export knows the tokenizers of the data."""
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer("bytes")
    checkpoints.make("pythia", "ponderlm", tmp_path / "run", {"tokenizer": "bytes", "eod_id": 256}, vocab_size=257)
    with pytest.raises(UserError, match=r"run has no chat template: it was not trained on conversations, and its"):
        generate(tmp_path / "run", ["hi"], chat=True)
    text = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}>"
    template = of_text("mine", text, tokenizer)
    chat.write(tmp_path / "run", chat.Chat(template, end_id=ord("e")))
    greedy = dict(max_new_tokens=9, temperature=0.0)
    asked, said = "[user] hi<EOD>>", [{"role": "user", "content": "hi"}]
    [found] = generate(tmp_path / "run", ["hi"], chat=True, **greedy)
    assert generate(tmp_path / "run", [json.dumps(said)], chat=True, **greedy)[0].text == found.text
    assert "chat template" not in str(export(tmp_path / "run", tmp_path / "hf"))
    bare = str(export(tmp_path / "run", tmp_path / "bare", tokenizer_path="none"))
    assert "but without its tokenizer (data.tokenizer) the folder has no chat template" in bare
    with pytest.raises(UserError, match=r"bare has no chat template: .*; export the run again with --tokenizer if"):
        generate(tmp_path / "bare", ["hi"], chat=True, tokenizer="bytes")
    assert generate(tmp_path / "hf", ["hi"], chat=True, **greedy) == [found]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs.apply_chat_template(said, tokenize=False) == asked
    ends = json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [ord("e"), 256]
    assert generate(tmp_path / "hf", [asked], **greedy, tokenizer=str(tmp_path / "hf"))[0].text.startswith(found.text)
    assert "its ids may mean other texts" not in caplog.text
    Tokenizer(models.WordLevel({"hi": 0, "<eos>": 1})).save(str(tmp_path / "other.json"))
    generate(tmp_path / "hf", ["hi"], **greedy, tokenizer=str(tmp_path / "other.json"))
    assert f"and the data of {tmp_path / 'hf'} have" in caplog.text and tokenizer.fingerprint[:12] in caplog.text
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "run"), "hi", "--chat", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == found.text + "\n"
    with pytest.raises(UserError, match=r"prompt .*: messages\[0\] has the role 'owl'; known"):
        generate(tmp_path / "run", ['[{"role": "owl", "content": "a"}]'], chat=True)
    with pytest.raises(UserError, match=r"prompt .*: a list of messages must be JSON \(unexpected end"):
        generate(tmp_path / "run", ['[{"role": "user"'], chat=True)


@pytest.mark.parametrize("method", ["ponderlm3", "adaptive_cot"])
def test_adaptive_checkpoints_generate(method: str, tmp_path: Path) -> None:
    """Straight from the checkpoint, padded together or alone, with the cache or without."""
    checkpoints.make("llama", method, tmp_path / "run", data={"tokenizer": "bytes", "eod_id": 256}, vocab_size=257)
    greedy = dict(max_new_tokens=3, temperature=0.0)
    want = generate(tmp_path / "run", PROMPTS[1:], **greedy)
    assert generate(tmp_path / "run", PROMPTS[1:], use_cache=False, **greedy) == want
    assert [generate(tmp_path / "run", [p], **greedy)[0] for p in PROMPTS[1:]] == want


def test_sampling_follows_the_seed(run: Path) -> None:
    sample = dict(max_new_tokens=8, temperature=1.0, top_p=0.9)
    first = generate(run / "run", ["The"], seed=1, **sample)
    assert generate(run / "hf", ["The"], seed=1, **sample) == first
    assert any(generate(run / "run", ["The"], seed=s, **sample) != first for s in range(2, 6))
    assert generate(run / "run", ["The"], seed=3, top_k=1, max_new_tokens=8) == generate(
        run / "run", ["The"], temperature=0.0, max_new_tokens=8
    )


def test_end_of_document_ends_the_text(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megaponder.inference import generate as module

    loaded = module.load(run / "run")
    with torch.no_grad():
        loaded.model.lm_head.weight[256] = 100 * loaded.model.model.norm.bias + loaded.model.lm_head.weight[256]
        loaded.model.model.norm.bias *= 50
    monkeypatch.setattr(module, "load", lambda *a: loaded)
    (result,) = generate(run / "run", ["a"], max_new_tokens=8, temperature=0.0)
    assert result.ended and result.tokens == 1 and result.text == ""


@pytest.mark.parametrize(
    "change,words",
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"max_new_tokens": 60}, "longest sequence of 64; request at most 54"),
        ({"prompts": []}, "there is no prompt"),
        ({"tokenizer": "none"}, "--tokenizer none: text needs a tokenizer; leave it out, or give"),
        ({"source": "nowhere"}, "nowhere"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"temperature": 1e-40}, "temperature = 1e-40"),
        ({"seed": 10**30}, "less than 2"),
        ({"seed": -1}, "seed = -1"),
        ({"device": "cuda:99"}, "this machine has no such device"),
        ({"device": "meta"}, "this machine has no such device"),
        ({"prompts": ["\udcff"]}, "not valid UTF-8"),
        ({"prompts": ["0123456789" * 7]}, "leaves no room in the model's longest sequence of 64; shorten it"),
    ],
)
def test_mistakes(run: Path, change: dict[str, object], words: str) -> None:
    call = {"source": run / "run", "prompts": ["0123456789"], **change}
    with pytest.raises(UserError, match=words):
        generate(**call)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_hidden_layers", "2", "config.json: num_hidden_layers = '2'"),
        ("method", "foo", "config.json: ponder.method = 'foo'"),
        ("method_options", 5, "config.json: ponder.options = 5"),
        ("method_options", {"steps": 10**9}, "config.json: ponder.options.steps = 1000000000"),
        ("embedding_scale", "x", "config.json: embedding_scale = 'x'"),
        ("eos_token_id", "</s>", "config.json: eos_token_id = '</s>': it must be the id of a token, or null"),
        ("num_hidden_layers", 10**9, "has 1,000,000,000 layers, but the weights have"),
        ("vocab_size", 10**9, "describes a model of [0-9,]* parameters, but the weights have"),
        ("auto_map", 5, "auto_map = 5 does not name a class of a file in this folder"),
        ("quantization_config", {"quant_method": "gptq"}, "quantised"),
    ],
)
def test_an_edited_export_is_a_sentence(run: Path, tmp_path: Path, field: str, value: object, words: str) -> None:
    shutil.copytree(run / "hf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=words):
        generate(tmp_path / "hf", ["a"], max_new_tokens=1)


def test_code_of_a_folder_runs_only_if_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "hf", tmp_path / "hf")
    code = tmp_path / "hf" / "modeling_megaponder.py"
    mark = f"\nfrom pathlib import Path\n\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    code.write_text(code.read_text() + mark)
    for use in (lambda: generate(tmp_path / "hf", ["a"]), lambda: import_hf(tmp_path / "hf", tmp_path / "run")):
        with pytest.raises(UserError, match="use --trust-remote-code"):
            use()
    assert not (tmp_path / "ran").exists()
    (result,) = generate(tmp_path / "hf", ["a"], max_new_tokens=1, temperature=0.0, trust_remote_code=True)
    assert (tmp_path / "ran").exists() and result.prompt == "a"


def test_weights_that_are_pickled_or_not_finite_are_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "hf", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    bad = {name: t * float("nan") if "final" in name or "norm" in name else t for name, t in tensors.items()}
    save_file(bad, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="has values that are not finite"):
        generate(tmp_path / "hf", ["a"])
    file.unlink()
    torch.save(tensors, tmp_path / "hf" / "pytorch_model.bin")
    with pytest.raises(UserError, match="is pickled, and unpickling runs code"):
        generate(tmp_path / "hf", ["a"])


def test_a_tokenizer_of_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(300)} | {"</s>": 300}
    own = Tokenizer(models.WordLevel(words, unk_token="w0"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.add_special_tokens(["</s>"])
    own.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="the tokenizer gives token id 299, but the model has 257 ids"):
        generate(run / "run", ["w5 w299"], tokenizer=str(tmp_path / "tokenizer.json"))


def test_a_run_is_read_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its relative paths start where it was started; where that is not known, commands say what they can do without."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["</s>"])
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpoints.make("llama", "loop", Path("runs/loop"), data={"tokenizer": "words.json", "eod_id": 2})
    want = generate("runs/loop", ["a"], max_new_tokens=2, temperature=0.0)
    monkeypatch.chdir("away")
    assert generate("../runs/loop", ["a"], max_new_tokens=2, temperature=0.0) == want
    export("../runs/loop", "hf")
    assert generate("hf", ["a"], max_new_tokens=2, temperature=0.0) == want
    (tmp_path / "words.json").unlink()
    for use, fix in (
        (lambda: generate("../runs/loop", ["a"]), "set --tokenizer to its path[.]"),
        (lambda: export("../runs/loop", "hf2"), "set --tokenizer to its path, or to 'none' to export without one[.]"),
    ):
        with pytest.raises(UserError, match=f'words.json: no such tokenizer; .* or "bytes"; {fix}$'):
            use()


@pytest.fixture(scope="module")
def ada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adaponderlm checkpoint over bytes whose tokens halt at different depths."""
    folder = tmp_path_factory.mktemp("ada")
    data = {"tokenizer": "bytes", "eod_id": 256}
    checkpoints.make("llama", "adaponderlm", folder / "run", data=data, vocab_size=257)
    return folder / "run"


def test_batches_by_depth_and_speculation_write_the_same_text(
    ada: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["The quick", "a", "é", "brown fox"]
    greedy = dict(max_new_tokens=6, temperature=0.0)
    want = generate(ada, prompts, depths=True, **greedy)
    assert len({d for text in want for d in text.depths or ()}) > 1
    assert [len(t.depths or ()) for t in want] == [
        len(p.encode()) + t.tokens - 1 for p, t in zip(prompts, want, strict=True)
    ]
    assert generate(ada, prompts, rows=3, depths=True, **greedy) == want
    plain = [(text.text, text.tokens) for text in want]
    assert [(t.text, t.tokens) for t in generate(ada, prompts, speculate=3, **greedy)] == plain
    lines = "\n".join(json.dumps({"prompt": p}, ensure_ascii=False) + "\n" for p in prompts)  # with empty lines
    (tmp_path / "in.jsonl").write_text("\ufeff" + lines, encoding="utf-8")
    (tmp_path / "in.txt").write_text("".join(p + "\n" for p in prompts))
    for name in ("in.jsonl", "in.txt"):
        command = [
            "generate",
            str(ada),
            "--batch",
            str(tmp_path / name),
            "--max-tokens",
            "6",
            "--depths",
            "--rows",
            "2",
        ]
        capsys.readouterr()
        assert main(command) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(r["prompt"], r["text"], tuple(r["depths"])) for r in rows] == [
            (t.prompt, t.text, t.depths) for t in want
        ]
    told: list[object] = []
    assert generate(ada, prompts, rows=2, depths=True, on_text=told.append, **greedy) == told == want
    odd = "a\u2028b\x0cc\x85d"  # no ends of lines
    for name, line in (("odd.txt", odd), ("odd.JSONL", json.dumps({"text": odd}, ensure_ascii=False))):
        (tmp_path / name).write_text(line + "\n", encoding="utf-8")
        assert main(["generate", str(ada), "--batch", str(tmp_path / name), "--max-tokens", "1"]) == 0
        assert [json.loads(s)["prompt"] for s in capsys.readouterr().out.removesuffix("\n").split("\n")] == [odd]
    capped = generate(ada, prompts, passes=1, depths=True, **greedy)
    assert all(set(text.depths or ()) == {1} for text in capped)


def test_exits_of_ouro_are_batched_where_they_leave_loops_out(tmp_path: Path) -> None:
    """The threshold of a call decides, too: at 1 every token runs every loop, which can be batched."""
    options, data = {"loops": 3, "threshold": 1.0}, {"tokenizer": "bytes", "eod_id": 256}
    for name, skips in (("runs", False), ("skips", True)):
        given = {"method_options": options | {"skips_loops": skips}, "vocab_size": 257}
        checkpoints.make("llama", "ouro", tmp_path / name, data=data, **given)
    greedy = dict(max_new_tokens=4, temperature=0.0, depths=True)
    want = generate(tmp_path / "runs", PROMPTS, **greedy)
    assert generate(tmp_path / "runs", PROMPTS, rows=2, **greedy) == want
    early = generate(tmp_path / "skips", PROMPTS, threshold=0.5, **greedy)
    assert generate(tmp_path / "skips", PROMPTS, threshold=0.5, rows=2, **greedy) == early != want
    with pytest.raises(UserError, match=r"with threshold 0.5 a token that has exited .* is true; give its"):
        generate(tmp_path / "runs", PROMPTS, threshold=0.5, rows=2, **greedy)


def test_cores_stop_and_keep_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exits and budgets of keys and values are options of the command, too."""
    run, data = str(tmp_path / "run"), {"tokenizer": "bytes", "eod_id": 256}
    checkpoints.make("llama", "huginn", tmp_path / "run", data=data, vocab_size=257)
    greedy = dict(max_new_tokens=6, temperature=0.0, depths=True)
    (whole,) = generate(run, ["The quick"], **greedy)
    (first,) = generate(run, ["The quick"], exit_by="entropy", exit_below=1e9, **greedy)
    (less,) = generate(run, ["The quick"], kv_budget=1, **greedy)
    assert set(whole.depths or ()) == set(less.depths or ()) == {3} and set(first.depths or ()) == {2}
    assert first.text != whole.text != less.text
    flags = ["--exit-by", "entropy", "--exit-below", "1e9", "--kv-budget", "0", "--depths", "--max-tokens", "6"]
    capsys.readouterr()
    assert main(["generate", run, "The quick", *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("(mean 2.00)")
    (tmp_path / "one.txt").write_text("The quick\n")
    for wrong, words in (
        (["The quick", "--exit-below", "-1"], "exit_below = -1.0: it must be at least 0; use 0."),
        (["--batch", str(tmp_path / "one.txt"), "--exit-below", "1"], "method huginn cannot be batched by depth: its"),
    ):
        assert main(["generate", run, *wrong, "--max-tokens", "6"]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["x", "--batch", "nowhere"], "--batch nowhere: its prompts are the file's; leave out 'x'"),
        ([], "required: PROMPT"),
        (["--batch", "nowhere"], "--batch nowhere: it cannot be read"),
        (["--batch", "bad.jsonl"], 'bad.jsonl, line 2: it must be a JSON object with a text "prompt" or "text"'),
        (["--batch", "ok.txt", "--speculate", "2"], "--batch excludes --speculate; leave one out"),
        (["--batch", "ok.txt", "--rows", "0"], "rows = 0: it must be at least 1; use 32"),
        (["--batch", "empty.txt"], "--batch empty.txt: it is empty; write one prompt a line"),
        (["--batch", "deep.jsonl"], 'deep.jsonl, line 1: it must be a JSON object with a text "prompt" or "text"'),
        (["--batch", "long.txt"], "prompt 2, of 99 tokens, leaves no room in the model's longest sequence of 64"),
        (["x", "--rows", "8"], "--rows 8: it belongs to --batch"),
        (["x", "--passes", "1", "--speculate", "2"], "a token has one pass, so no deeper one could verify drafts"),
        (["x", "--no-cache", "--speculate", "2"], "use_cache = False: speculate = 2 excludes it, since it needs the"),
        (["x", "--passes", "9"], "passes = 9: it must be 1 to 4, the passes that the model was trained with"),
        (["x", "--kv-budget", "1"], "kv_budget = 1: method adaponderlm has no such option"),
        (
            ["x", "--threshold", "nan"],
            "threshold = nan: it must lie between 0 and 1, and a finite number; leave it out.",
        ),
        (["x", "--threshold", "1.5"], "threshold = 1.5: it must lie between 0 and 1; use 1."),
        (["x", "--exit-by", "cosine"], "exit_by = 'cosine': this model's method does not take it; leave it out"),
        (
            ["x", "--speculate", "2", "--temperature", "1"],
            "temperature = 1.0: speculate = 2 excludes it, since it writes greedy text; leave one of them out",
        ),
        (["x", "--speculate", "2", "--depths"], "depths = True: speculate = 2 excludes it, since it does not tell"),
        (["x", "--speculate", "-1"], "speculate = -1: it must be at least 1; use 4"),
        (["x", "--speculate", "0"], "speculate = 0: it must be at least 1; use 4, or leave it out"),
        (["x", "--tokenizer", "none"], "--tokenizer none: text needs a tokenizer"),
    ],
)
def test_mistakes_with_batches(
    ada: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n[1]\n')
    texts = {"ok.txt": "a\n", "empty.txt": "", "deep.jsonl": "[" * 99_999, "long.txt": f"a\n{'b' * 99}\nc"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert main(["generate", str(ada), "--max-tokens", "4", *command]) == 2
    assert words in capsys.readouterr().err
