"""From conversations to token ids and marks: formats, templates, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaponder.cli.main import main
from megaponder.data.audit import audit
from megaponder.data.conversations import BadRecordError, Conversation, conversation
from megaponder.data.indexed import read_index
from megaponder.data.info import read_meta
from megaponder.data.prepare import PrepareOptions, prepare
from megaponder.data.samples import encode
from megaponder.data.template import BUILT_IN, find_template, of_text
from megaponder.data.tokenizer import Tokenizer, load_tokenizer
from megaponder.errors import UserError
from tests.data_pipeline.make import huggingface_tokenizer, jsonl

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the cat sat?"},
    {"role": "assistant", "content": "on the mat"},
    {"role": "user", "content": " and é🙂 "},
    {"role": "assistant", "content": "a small 東京 text"},
]
MARKED = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}\
<|im_end|>{% endif %}

{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(str(huggingface_tokenizer(folder / "tokenizer.json", SPECIAL)))


def learnt(ids: list[int], marks: list[int], tokenizer: Tokenizer) -> list[str]:
    """The text of each run of marked tokens."""
    cuts = np.flatnonzero(np.diff([0, *marks, 0]))
    return [tokenizer.decode(ids[a:b]) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


def test_formats() -> None:
    pair = [("user", "add"), ("assistant", "3")]
    same: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "3"}]},
        {"conversations": [{"from": "human", "value": "add"}, {"from": "gpt", "value": "3"}]},
        {"instruction": "add", "input": "", "output": "3"},
        {"instruction": "add", "output": "3", "history": []},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "add"}]}, {"from": "model", "value": "3"}]},
    ]
    for record in same:
        assert [(m["role"], m["content"]) for m in conversation(record).messages] == pair, record
    asked = conversation({"instruction": "add", "input": "1 2", "output": "3", "system": "s"}).messages
    assert [m["content"] for m in asked] == ["s", "add\n\n1 2", "3"]
    told = conversation({"talk": TURNS}, "talk")
    assert told.messages == TURNS and told.text_bytes == sum(len(m["content"].encode()) for m in TURNS)


@pytest.mark.parametrize(
    ("record", "reason", "words"),
    [
        ([], "bad_field", "is not an object"),
        ({"text": "a"}, "bad_field", r"no field messages, conversations, or instruction and output \(fields: text\)"),
        ({"messages": []}, "bad_field", "is not a list of messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no_answer", "nothing to learn"),
        ({"instruction": "a", "output": " "}, "no_answer", "nothing to learn"),
        ({"instruction": "a", "output": 3}, "bad_field", "field 'output' is not a string"),
        ({"messages": [{"role": "owl", "content": "a"}]}, "unknown_role", r"messages\[0\] has the role 'owl'; known"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "unknown_role", "has the role"),
        ({"messages": [{"role": "user", "content": 4}]}, "bad_field", r"messages\[0\] has no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "bad_field", "has no text"),
        ({"messages": ["a"]}, "bad_field", r"messages\[0\] is not an object"),
    ],
)
def test_what_is_no_conversation(record: Any, reason: str, words: str) -> None:
    with pytest.raises(BadRecordError, match=words) as caught:
        conversation(record)
    assert caught.value.reason == reason


def test_marks_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    """Ids and masks of apply_chat_template; a template without marks gives the same, and white space behind an answer
    is not learnt."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=tokenizer.name, eos_token=SPECIAL[0])
    want = theirs.apply_chat_template(
        TURNS, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    ids, marks = encode(Conversation(TURNS), of_text("marked", MARKED, tokenizer), tokenizer)
    assert marks == want["assistant_masks"][: len(ids)] and ids == want["input_ids"][: len(ids)]
    assert not any(want["assistant_masks"][len(ids) :]) and sum(marks) > 10
    assert learnt(ids, marks, tokenizer) == ["on the mat<|im_end|>", "a small 東京 text<|im_end|>"]
    assert encode(Conversation(TURNS), find_template("chatml", tokenizer), tokenizer) == (ids, marks)
    assert theirs.apply_chat_template(TURNS, chat_template=BUILT_IN["chatml"], tokenize=True)["input_ids"][:-1] == ids


def test_every_answer_ends(tokenizer: Tokenizer) -> None:
    """With a special token, or with the end-of-document token behind the last; bytes and alpaca too."""
    plain = of_text("plain", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", tokenizer)
    ids, marks = encode(Conversation(TURNS[1:3]), plain, tokenizer)
    assert learnt(ids, marks, tokenizer) == ["assistant: on the mat\n<|endoftext|>"]  # it has no header to ask with
    names = load_tokenizer("bytes")
    ids, marks = encode(Conversation(TURNS), find_template("alpaca", names), names)
    assert learnt(ids, marks, names) == ["on the mat<EOD>", "a small 東京 text<EOD>"]
    assert names.decode(ids).startswith("be brief\n\n### Instruction:\nthe cat sat?\n\n### Response:\non the mat<EOD>")
    ids, marks = encode(Conversation(TURNS[2:3]), plain, tokenizer)
    assert not marks[0] and all(marks[1:])  # nothing predicts the first token


def test_tools_are_written_or_refused(tokenizer: Tokenizer) -> None:
    call = [*TURNS[1:2], {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}, *TURNS[2:3]]
    chatml = find_template("chatml", tokenizer)
    text = "{% for m in messages %}{{ m.role }} {{ m.content }}{{ m.tool_calls }}<|im_end|>{% endfor %}"
    own = of_text("own", "{{ tools }}" + text, tokenizer)
    for record, name in (
        ({"messages": call}, "tool_calls"),
        ({"messages": TURNS, "tools": [{"name": "look"}]}, "tools"),
        ({"messages": TURNS, "tools": '[{"name": "look"}]'}, "tools"),
    ):
        with pytest.raises(BadRecordError, match=rf"chatml does not write the field {name}, .*--template tokenizer"):
            encode(conversation(record), chatml, tokenizer)
        encode(conversation(record), own, tokenizer)
    encode(conversation({"messages": TURNS, "tools": "[]"}), chatml, tokenizer)
    with pytest.raises(BadRecordError, match="field 'tools' is neither a list nor one as JSON"):
        conversation({"messages": TURNS, "tools": "look"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('no') }}", "template odd: no"),
        ("{{ messages[99].content }}", "template odd: .*has no element 99"),
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "leaves out what the system says"),
        ("{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}", "changes earlier messages"),
        ("{% generation %}{{ messages|map(attribute='content')|join }}{% endgeneration %}", "marks 1 of 2 answers"),
    ],
)
def test_templates_that_cannot(tokenizer: Tokenizer, text: str, words: str) -> None:
    with pytest.raises(BadRecordError, match=words) as caught:
        encode(Conversation(TURNS), of_text("odd", text, tokenizer), tokenizer)
    assert caught.value.reason == "template"


def test_finding_templates(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"this tokenizer has no chat template; use --template alpaca or chatml"):
        find_template("tokenizer", tokenizer)
    with pytest.raises(UserError, match=r"--template chatml: <\|im_start\|> and <\|im_end\|> must be special .*alpaca"):
        find_template("chatml", load_tokenizer("bytes"))
    with pytest.raises(UserError, match=r"--template gone\.jinja: there is no such file; use one of alpaca, chatml"):
        find_template("gone.jinja", tokenizer)
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=r"bad\.jinja cannot be read as a chat template"):
        find_template(str(tmp_path / "bad.jinja"), tokenizer)
    huggingface_tokenizer(tmp_path / "tokenizer.json", SPECIAL)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d{{ bos_token }}"}]
    settings = {"chat_template": named, "bos_token": {"content": "<|im_start|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = find_template("tokenizer", load_tokenizer(str(tmp_path)))
    assert (found.text, found.bos, found.eos) == ("d{{ bos_token }}", "<|im_start|>", "<|endoftext|>")


@pytest.fixture
def options(tmp_path: Path) -> PrepareOptions:
    records: list[Any] = [
        {"instruction": f"say {i}", "input": "x" * (i % 7), "output": f"it is {i}"} for i in range(90)
    ]
    records += [{"messages": TURNS}, {"instruction": "a"}, {"instruction": "a", "output": ""}]
    records += [{"instruction": "<|im_end|>", "output": "b"}, {"messages": [{"role": "owl", "content": "a"}]}]
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    path = str(huggingface_tokenizer(tmp_path / "tokenizer.json", SPECIAL))
    return PrepareOptions([str(tmp_path / "a.json")], str(tmp_path / "one"), path, template="chatml", on_error="skip")


def test_prepare(options: PrepareOptions, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A list and lines give the same files, whatever the chunks; what is skipped is counted; marks are checked."""
    done = prepare(options)
    skipped = {"bad_field": 1, "no_answer": 1, "special_token": 1, "unknown_role": 1}
    assert done.meta.documents == 91 and done.meta.skipped == skipped
    told = done.meta.conversations
    assert told is not None and told.answers == 92 and told.template_text == BUILT_IN["chatml"]
    index = read_index(options.output)
    assert index.mask is not None and told.targets == np.asarray(index.mask).sum()
    assert (index.ids[:][np.cumsum(index.lengths[:]) - 1] == told.end_id).all() and told.end_id == 2
    other = PrepareOptions(
        [str(tmp_path / "a.jsonl")], str(tmp_path / "two"), options.tokenizer, template="chatml", on_error="skip",
        workers=2, chunk_bytes=700, shard_bytes=500,
    )  # fmt: skip
    prepare(other)
    for suffix in (".bin", ".idx", ".mask"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    audit([options.output])
    marks = bytearray((tmp_path / "two.mask").read_bytes())
    marks[3] ^= 1
    (tmp_path / "two.mask").write_bytes(marks)
    with pytest.raises(UserError, match=r"two\.mask: changed after it was written"):
        audit([other.output])
    (tmp_path / "two.mask").unlink()
    with pytest.raises(UserError, match=r"two\.mask: there is no such file, and .*two\.json says that the dataset"):
        read_meta(read_index(other.output))
    text = jsonl(tmp_path / "text.jsonl", ["the cat"])
    prepare(PrepareOptions([str(text)], options.output, options.tokenizer, overwrite=True))
    assert read_index(options.output).mask is None


def test_answers_that_nothing_ends(options: PrepareOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last is followed by the end-of-document token; the others are counted."""
    (tmp_path / "a.json").write_text(json.dumps([{"messages": TURNS}, {"messages": TURNS[:3]}]))
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    where = ["--tokenizer", options.tokenizer, "--output", options.output, "--workers", "1"]
    assert main(["prepare", *options.inputs, "--template", str(tmp_path / "t.jinja"), *where]) == 0
    assert "warning: 1 answers end with no special token" in capsys.readouterr().out
    assert prepare(replace(options, overwrite=True)).unended == 0


def test_all_are_skipped(options: PrepareOptions, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "a"}, {"instruction": "a", "output": ""}]))
    words = r"all documents were skipped \(1 bad_field, 1 no_answer\); the first is .*a\.json:1: it has no field"
    with pytest.raises(UserError, match=words):
        prepare(options)


def test_prepare_refuses(options: PrepareOptions, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for changes, words in (
        ({"on_error": "fail"}, r"a\.json:92: it has no field .*; fix the file, or skip such documents with --on-error"),
        ({"inputs": [str(tmp_path / "a.txt")]}, r"conversations \(--template\) are read from \.jsonl and \.json files"),
        ({"append_eod": False}, r"--no-append-eod: the template says how a conversation begins and ends"),
    ):
        with pytest.raises(UserError, match=words):
            prepare(PrepareOptions(**{**vars(options), **changes}))  # type: ignore[arg-type]
    (tmp_path / "a.json").write_text("[1,")
    with pytest.raises(UserError, match=r"a\.json: not valid JSON"):
        prepare(options)
