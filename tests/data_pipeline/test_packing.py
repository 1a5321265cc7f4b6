"""Conversations in sequences: each whole, once an epoch, in an order that depends on seed, epoch and index alone."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaponder.config.load import load_config
from megaponder.data import packing
from megaponder.data.check import check_data, fill_from_data, open_data
from megaponder.data.document_length import document_tokens
from megaponder.data.epochs import summary
from megaponder.data.indexed import read_index
from megaponder.data.packing import in_stored_order, joined, pack, sequences_in, window
from megaponder.data.stream import build_streams
from megaponder.errors import ConfigError, UserError
from tests.data_pipeline.make import EOD, config, random_documents, write_conversations, write_documents

SEQ = 16


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=300))
def test_packs_hold_everything_once(lengths: list[int]) -> None:
    packs = pack(np.array(lengths), SEQ + 1)
    assert sorted(n for one in packs for n in one) == list(range(len(lengths)))
    filled = [sum(min(lengths[n], SEQ + 1) for n in one) for one in packs]
    assert max(filled) <= SEQ + 1
    if len(packs) <= 64:  # all were open until the end: no two of them fit into one
        assert len(packs) == 1 or sum(sorted(filled)[:2]) > SEQ + 1


@settings(max_examples=200)
@given(mask=st.lists(st.sampled_from([0, 0, 0, 1]), min_size=2, max_size=60))
def test_a_cut_conversation_keeps_targets(mask: list[int]) -> None:
    marks = np.array([0, *mask], np.int8)
    if not marks.any():
        marks[-1] = 1
    begin, end = window(marks, 9)
    assert 0 <= begin < end <= len(marks) and end - begin == min(9, len(marks))
    assert marks[begin + 1 : end].any()  # behind a token that predicts it
    if marks[:9].any():
        assert begin == 0
    else:
        first = int(np.argmax(marks))
        answer = int(np.argmin(np.append(marks[first:], 0)))
        assert marks[begin + 1 : end].sum() == min(answer, 8)  # the whole first answer, or as much as there is room for


def test_sequences_are_the_conversations(tmp_path: Path) -> None:
    """Every sequence is read back into conversations: all of them once an epoch, the cut ones as `window` cuts."""
    prefix = write_conversations(tmp_path / "c", 50, 24)
    index = read_index(prefix)
    ends = np.cumsum(index.lengths[:])
    ids, marks = np.split(index.ids[:], ends[:-1]), np.split(np.asarray(index.mask), ends[:-1])
    cut = [window(m, SEQ + 1) for m in marks]
    parts = zip(ids, marks, cut, strict=True)
    wanted = sorted((i[a:b].tolist(), [0, *m[a + 1 : b].tolist()]) for i, m, (a, b) in parts)
    cfg = config(tmp_path, [prefix], loss_mask="answers", split="1", document_attention=True)
    cfg.train.eval_batches, cfg.train.epochs, cfg.train.global_batch = 0, 2, 1
    steps = check_data(cfg).steps
    assert steps is not None
    stream = build_streams(cfg, steps, 0).train
    found, places = [], 0
    for batch in stream.micro_batches(0, steps, steps, 0, 1):
        assert batch.starts_bn is not None and batch.edges is not None
        text = np.concatenate([batch.ids_bn, batch.labels_bn[:, -1:]], axis=1)
        for row, starts, counted in zip(text, batch.starts_bn.numpy(), batch.loss_mask_bn.numpy(), strict=True):
            begins = [*np.flatnonzero(starts == np.arange(SEQ)), SEQ + 1]
            for a, b in pairwise(begins):
                learnt = [0, *counted[a : b - 1].astype(int).tolist()]
                if any(learnt):
                    one = (row[a:b].tolist(), learnt)
                    if one not in wanted:  # one token of padding is no input, so it has no start
                        assert b == SEQ + 1 and row[SEQ] == EOD and not learnt[-1]
                        one = (row[a:SEQ].tolist(), learnt[:-1])
                    found.append(one)
                    assert not counted[b - 1 : b].any()  # of what another begins with
                else:
                    assert (row[a:b] == EOD).all()  # padding
                places += b - a
    assert sorted(found) == sorted(wanted * 2) and places == steps * (SEQ + 1)


def test_the_order_does_not_depend_on_the_budget(tmp_path: Path) -> None:
    """The first sequences are the same of more epochs, other batches, and with another order of reading."""
    cfg = config(tmp_path, [write_conversations(tmp_path / "c", 60, 8)], loss_mask="answers", split="1")
    cfg.train.eval_batches = 0
    short, long = build_streams(cfg, 5, 0).train, build_streams(cfg, 70, 0).train
    assert [short.sequence(i).tolist() for i in range(5)] == [long.sequence(i).tolist() for i in range(5)]
    epochs = [tuple(long.sequence(i).tolist()) for i in range(70)]
    assert len(set(epochs)) > 40  # each epoch packs in its own way


def test_texts_and_conversations_blend(tmp_path: Path) -> None:
    """Texts keep their own targets and documents; `plain` reads conversations as texts."""
    talks = write_conversations(tmp_path / "c", 30, 24)
    texts = write_documents(tmp_path / "t", random_documents([9, 30, 12] * 10))
    cfg = config(tmp_path, [0.5, talks, 0.5, texts], loss_mask="answers", valid={"talks": [talks], "texts": [texts]})
    cfg.data.document_attention = True
    streams = build_streams(cfg, 40, 4)
    both = {len(streams.train.dataset[i]) for i in range(40)}  # type: ignore[attr-defined]
    assert both == {2, 4}  # with the number of the source
    [batch] = streams.train.micro_batches(0, 8, 8, 0, 1)
    assert batch.edges is not None and batch.starts_bn is not None
    assert [len(streams.valid[name].dataset[0]) for name in ("talks", "texts")] == [3, 1]
    assert (batch.starts_bn[:, 0] == 0).all()
    cfg = config(tmp_path, [talks], loss_mask="plain", split="1")
    cfg.train.eval_batches = 0
    assert len(build_streams(cfg, 4, 0).train.dataset[0]) == 1  # type: ignore[arg-type]


def test_evaluation_reads_each_conversation_once(tmp_path: Path) -> None:
    index = read_index(write_conversations(tmp_path / "c", 40, SEQ))
    items = list(in_stored_order(index, SEQ, EOD))
    assert sum(item["targets"].sum() for item in items) == np.asarray(index.mask).sum()
    assert document_tokens(index, SEQ) == pytest.approx(np.average(index.lengths[:], weights=index.lengths[:]))


def test_epochs_are_steps(tmp_path: Path) -> None:
    """Of texts too; what disagrees is refused, and a budget on the command line replaces the file's."""
    texts = write_documents(tmp_path / "t", random_documents([9, 30, 12] * 10))
    cfg = config(tmp_path, [texts], split="1")
    cfg.train.eval_batches, cfg.train.epochs, cfg.train.global_batch = 0, 3, 4
    facts = check_data(cfg)
    assert facts.steps == -(-((3 * 510 - 1) // SEQ) // 4)
    assert fill_from_data(cfg, facts).train.steps == facts.steps
    cfg.train.steps = 7
    with pytest.raises(ConfigError, match=r"train\.steps = 7: train\.epochs = 3 is 24 steps"):
        check_data(cfg)
    file = tmp_path / "c.yaml"
    file.write_text("train: {steps: 7}")
    train = load_config(file, ["--train.epochs", "2"]).train
    assert (train.steps, train.tokens, train.epochs) == (None, None, 2)


def test_conversations_attend_to_themselves(tmp_path: Path) -> None:
    """What says otherwise is refused; a base model's file, written for texts, is not."""
    file, words = tmp_path / "c.yaml", r"data\.document_attention = False: with data\.loss_mask: answers each"
    file.write_text("data: {document_attention: false, loss_mask: answers}")
    with pytest.raises(ConfigError, match=words):
        load_config(file)
    file.write_text("data: {document_attention: false, loss_mask: plain}")
    assert load_config(file, ["--data.loss_mask", "answers"]).data.loss_mask == "answers"
    with pytest.raises(ConfigError, match=words):
        load_config(file, ["--data.loss_mask", "answers", "--data.document_attention", "false"])


def test_epochs_of_weights(tmp_path: Path) -> None:
    """They are those of the conversations; it is said how often each source is read, and where prompts are learnt."""
    talks = write_conversations(tmp_path / "c", 40, 24)
    texts = write_documents(tmp_path / "t", random_documents([9, 30, 12] * 10))
    cfg = config(tmp_path, [0.75, talks, 0.25, texts], split="8,2", loss_mask="answers", document_attention=True)
    cfg.train.eval_batches, cfg.train.epochs, cfg.train.global_batch = 0, 3, 1
    opened = open_data(cfg.data)
    cfg = fill_from_data(cfg, facts := check_data(cfg, opened))
    stream = build_streams(cfg, facts.steps or 0, 0).train
    read = [tuple(stream.item(i)["text"]) for i in range(len(stream)) if stream.source(i, i + 1) == talks]
    packs = sequences_in(opened[talks].index.lengths[:32], np.arange(32, dtype=np.int32), SEQ + 1, 1234, 3)
    assert abs(len(read) - packs) <= 1 and len(stream) == -(-packs * 4 // 3)
    said = summary(cfg, facts.train, opened)
    assert len(said) == 1
    times = [float(word) for word in re.findall(r"([\d.]+) times", said[0])]
    assert times[0] == pytest.approx(3, abs=0.2)
    assert times[1] == pytest.approx(len(stream) / 4 / ((facts.train[1].tokens - 1) // SEQ), abs=0.006)
    cfg.data.loss_mask, cfg.train.steps = "plain", None
    with pytest.raises(ConfigError, match=r"train\.epochs = 3: by the weights .*; set train\.steps"):
        check_data(cfg)
    cfg.train.epochs = None
    [said_of_plain] = summary(cfg, check_data(cfg).train, opened)
    assert "c holds conversations, and data.loss_mask: plain learns its prompts too" in said_of_plain
    assert "fill" in packing.summary(talks, opened[talks].index, SEQ, 32)
    assert "data.split holds back 8 more." in packing.summary(talks, opened[talks].index, SEQ, 32)


def test_refusals(tmp_path: Path) -> None:
    talks = write_conversations(tmp_path / "c", 10, 24)
    texts = write_documents(tmp_path / "t", random_documents([9, 30, 12] * 10))
    with pytest.raises(ConfigError, match=r"data\.loss_mask = 'ignore_eod_target': .*c holds conversations, of which"):
        check_data(config(tmp_path, [talks]))
    with pytest.raises(ConfigError, match=r"none of the datasets of data\.train holds conversations"):
        check_data(config(tmp_path, [texts], loss_mask="answers"))
    Path(f"{talks}.mask").write_bytes(b"\1" * 3)
    with pytest.raises(UserError, match=r"c\.mask: it marks 3 tokens of a dataset of"):
        read_index(talks)
    assert joined(read_index(texts), np.array([], int), 4, 0)["targets"].sum() == 0
