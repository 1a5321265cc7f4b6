"""Streams: which tokens sequence i has depends on seed, blend and i alone."""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaponder.config.schema import RunConfig
from megaponder.data.batch import MicroBatch
from megaponder.data.sample_order import EpochGPTDataset, epochs_for, samples_in
from megaponder.data.stream import SampleStream, build_streams
from megaponder.errors import ConfigError, UserError
from tests.data_pipeline.make import EOD, config, random_documents, write_documents
from tests.distributed import Workers, run_workers

SEQ = 16


def rows(stream: SampleStream, first: int, count: int) -> list[list[int]]:
    return [stream.sequence(i).tolist() for i in range(first, first + count)]


@pytest.fixture
def blend(tmp_path: Path) -> RunConfig:
    a = write_documents(tmp_path / "a", random_documents([7, 30, 0, 16, 17, 1, 60] * 5))
    b = write_documents(tmp_path / "b", random_documents([12, 5, 33] * 8, seed=1))
    return config(tmp_path, [0.3, a, 0.7, b])


@settings(max_examples=40)
@given(lengths=st.lists(st.sampled_from([0, 1, 2, 5, SEQ - 1, SEQ, SEQ + 1, 3 * SEQ]), min_size=1, max_size=12))
@example(lengths=[SEQ, SEQ + 1, 1, 0])
@example(lengths=[1])
@example(lengths=[0, SEQ, 0])
def test_samples_are_the_documents_in_a_row(tmp_path: Path, lengths: list[int]) -> None:
    """Undo the shuffle: samples overlap by one token and together are the shuffled documents, epoch after epoch."""
    if not sum(lengths):
        return
    documents = [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]
    cfg = config(tmp_path, [write_documents(tmp_path / "h", documents)], loss_mask="plain", split="1")
    cfg.model.vocab_size, cfg.train.eval_batches = 2000, 0
    wanted = samples_in(3, sum(lengths), SEQ) or 1
    dataset = build_streams(cfg, wanted, 0).train.dataset
    epochs = epochs_for(wanted, sum(lengths), SEQ)
    row: list[int] = []
    for place in np.argsort(dataset.shuffle_index)[: samples_in(epochs, sum(lengths), SEQ)]:
        text = dataset[int(place)]["text"].tolist()
        assert len(text) == SEQ + 1 and (not row or row[-1] == text[0])
        row += text[1:] if row else text
    order = dataset.document_index[:].reshape(epochs, -1)
    assert all(sorted(epoch) == list(range(len(lengths))) for epoch in order.tolist())
    assert row == [t for d in order.reshape(-1) for t in documents[d]][: len(row)]
    starts = np.array(dataset.sample_index, dtype=np.int64)
    assert all(tuple(a) < tuple(b) for a, b in pairwise(starts))


def test_each_epoch_is_a_permutation_of_its_own(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a", random_documents([SEQ] * 40))
    cfg = config(tmp_path, [path], split="1")
    cfg.train.eval_batches = 0
    stream = build_streams(cfg, samples_in(3, 640, SEQ), 0).train
    epochs = [range(samples_in(e, 640, SEQ), samples_in(e + 1, 640, SEQ)) for e in range(3)]
    seen = [Counter(int(stream.dataset.shuffle_index[i]) for i in epoch) for epoch in epochs]
    assert all(set(s) == set(epoch) and max(s.values()) == 1 for s, epoch in zip(seen, epochs, strict=True))
    orders = [[int(stream.dataset.shuffle_index[i]) - epoch[0] for i in epoch] for epoch in epochs]
    assert orders[1][:20] != orders[2][:20]


def test_a_longer_budget_changes_nothing_before(blend: RunConfig) -> None:
    long = build_streams(blend, 900, 8)
    for asked in (1, 37, 300, 899):  # the sources have some 20 and 20 samples an epoch: many epoch edges
        assert rows(build_streams(blend, asked, 8).train, 0, asked) == rows(long.train, 0, asked)
    assert rows(build_streams(blend, 10, 60).valid[""], 0, 8) == rows(long.valid[""], 0, 8)


def test_reading_on_after_a_restart(blend: RunConfig) -> None:
    """Sequences of steps n ... m are the same with and without a restart, over many epochs."""
    steps = [build_streams(blend, 400, 0).train.micro_batches(8 * s, 8, 2, 0, 1) for s in range(2)]
    stream = build_streams(blend, 400, 0).train
    whole = [stream.micro_batches(8 * s, 8, 2, 0, 1) for s in range(50)]
    again = build_streams(blend, 400, 0).train
    rest = [again.micro_batches(8 * s, 8, 2, 0, 1) for s in range(17, 50)]
    assert _ids(rest) == _ids(whole[17:]) and _ids(steps) == _ids(whole[:2])


def _ids(steps: list[list[MicroBatch]]) -> list[list[list[int]]]:
    return [batch.ids_bn.tolist() for step in steps for batch in step]


@pytest.mark.parametrize(("micro", "size"), [(1, 1), (1, 4), (2, 2), (4, 3), (6, 4)])
def test_data_parallel_split_does_not_change_the_order(blend: RunConfig, micro: int, size: int) -> None:
    stream = build_streams(blend, 100, 0).train
    parts = [stream.micro_batches(5, 24, micro, rank, size) for rank in range(size)]
    count = 24 // micro
    joined = [parts[j % size][j // size] for j in range(count)]
    assert torch.cat([b.ids_bn for b in joined]).tolist() == [r[:-1] for r in rows(stream, 5, 24)]
    assert torch.cat([b.labels_bn for b in joined]).tolist() == [r[1:] for r in rows(stream, 5, 24)]


def test_reading_ahead_is_only_a_matter_of_speed(blend: RunConfig) -> None:
    stream, fresh = build_streams(blend, 100, 0).train, build_streams(blend, 100, 0).train
    for first, batch, micro, rank, size in [
        (0, 8, 2, 0, 1),
        (8, 8, 2, 0, 1),
        (16, 8, 4, 1, 2),
        (92, 8, 2, 0, 1),
        (0, 4, 1, 0, 1),
    ]:
        read = stream.micro_batches(first, batch, micro, rank, size)
        expected = [fresh.sequence(first + j * micro + i)[:-1].tolist()
                    for j in range(rank, batch // micro, size) for i in range(micro)]  # fmt: skip
        assert torch.cat([b.ids_bn for b in read]).tolist() == expected


def test_blend_weights_count_sequences(blend: RunConfig) -> None:
    stream = build_streams(blend, 1000, 0).train
    drawn = Counter(int(stream.dataset[i]["dataset_id"]) for i in range(1000))
    assert drawn == {0: 300, 1: 700}


def test_plain_paths_are_weighted_by_tokens_over_many_epochs(blend: RunConfig) -> None:
    a, b = str(blend.data.train[1]), str(blend.data.train[3])
    blend.data.train = [a, b]
    stream = build_streams(blend, 500, 0).train
    drawn = Counter(int(stream.dataset[i]["dataset_id"]) for i in range(500))
    tokens = [655, 400]
    assert len(stream) == 500 and abs(drawn[0] - 500 * tokens[0] / sum(tokens)) <= 1


def test_split_parts_share_no_document(tmp_path: Path) -> None:
    documents = [[i] * 30 for i in range(1, 51)]
    cfg = config(tmp_path, [write_documents(tmp_path / "a", documents)], split="8,2", loss_mask="plain")
    streams = build_streams(cfg, 200, 40)
    train = {t for r in rows(streams.train, 0, 200) for t in r}
    valid = {t for r in rows(streams.valid[""], 0, 40) for t in r}
    assert train == set(range(1, 41)) and valid == set(range(41, 51))


def test_separate_validation(tmp_path: Path) -> None:
    train = write_documents(tmp_path / "t", [[1] * 40] * 4)
    one, two = (write_documents(tmp_path / f"v{i}", [[i] * 40] * 3) for i in (2, 3))
    cfg = config(tmp_path, [train], valid=[1, one, 3, two], loss_mask="plain")
    streams = build_streams(cfg, 30, 40)
    assert {r[0] for r in rows(streams.train, 0, 30)} == {1}
    assert Counter(r[0] for r in rows(streams.valid[""], 0, 40)) == {2: 10, 3: 30}
    assert build_streams(cfg, 30, 0).valid == {}


def test_three_hundred_sources(tmp_path: Path) -> None:
    items: list[str | float] = []
    for i in range(300):
        items += [0.9 if i == 0 else 0.1 / 299, write_documents(tmp_path / f"s{i}", [[i] * 20] * 2)]
    cfg = config(tmp_path, items, loss_mask="plain", split="1")
    cfg.model.vocab_size, cfg.train.eval_batches = 300, 0
    ten = build_streams(cfg, 10, 0).train  # rounding each share up would ask for 308 samples, 277 of source 0
    assert len(ten) == 10 and {r[0] for r in rows(ten, 0, 10)} <= set(range(300))
    cfg.data.train = items[1::2]
    assert {r[0] for r in rows(build_streams(cfg, 300, 0).train, 0, 300)} == set(range(300))


def test_seed_and_rewritten_datasets(blend: RunConfig, tmp_path: Path) -> None:
    first = rows(build_streams(blend, 50, 0).train, 0, 50)
    blend.data.shuffle_seed = 5
    assert rows(build_streams(blend, 50, 0).train, 0, 50) != first
    blend.data.shuffle_seed = blend.train.seed
    assert rows(build_streams(blend, 50, 0).train, 0, 50) == first
    write_documents(tmp_path / "a", random_documents([50, 3] * 10, seed=9))  # under the old name: no old cache
    assert len(rows(build_streams(blend, 50, 0).train, 0, 50)) == 50


def test_other_number_types_and_several_sequences_a_document(tmp_path: Path) -> None:
    """Datasets of other tools: int32 ids, and documents of two sequences each."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32)
    for _ in range(20):
        builder.add_document(torch.arange(1, 31), [10, 20])
    builder.finalize(str(tmp_path / "m.idx"))
    cfg = config(tmp_path, [str(tmp_path / "m")], loss_mask="plain", eod_id=None)
    assert {t for r in rows(build_streams(cfg, 60, 4).train, 0, 60) for t in r} == set(range(1, 31))


def test_mistakes(blend: RunConfig, tmp_path: Path) -> None:
    stream = build_streams(blend, 20, 0).train
    with pytest.raises(ConfigError, match=r"train\.global_batch = 10: must be a multiple of .* = 8; use 8"):
        stream.micro_batches(0, 10, 2, 0, 4)
    with pytest.raises(ValueError, match="sequences 0 to 19"):
        stream.micro_batches(16, 8, 2, 0, 1)
    stream.vocab_size = 50
    with pytest.raises(UserError, match=r"model\.vocab_size = 50: sequence 0 of data\.train contains token id"):
        stream.micro_batches(0, 8, 2, 0, 1)
    (tmp_path / "file").write_text("")
    blend.data.cache = str(tmp_path / "file")
    with pytest.raises(UserError, match=r"set data\.cache to another folder"):
        build_streams(blend, 20, 0)


def worker(cfg: RunConfig, private: str | None = None) -> list[list[int]]:
    """In a process of its own: join a group, as training does, then read; every rank may have a disk of its own."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if private is not None:
        cfg.data.cache = os.path.join(private, os.environ["RANK"])
    streams = build_streams(cfg, 300, 8)
    dist.destroy_process_group()
    return rows(streams.train, 0, 300) + rows(streams.valid[""], 0, 8)


def test_ranks_and_jobs_share_a_cache_or_have_their_own(blend: RunConfig, tmp_path: Path) -> None:
    jobs = [Workers("tests.data_pipeline.test_stream:worker", 2, {"cfg": blend}) for _ in range(2)]
    try:
        results = [r for job in jobs for r in job.wait()]
    finally:
        for job in jobs:
            job.kill()
    private = run_workers(
        "tests.data_pipeline.test_stream:worker", 2, args={"cfg": blend, "private": str(tmp_path / "disks")}
    )
    streams = build_streams(blend, 300, 8)
    expected = rows(streams.train, 0, 300) + rows(streams.valid[""], 0, 8)
    assert all(r == expected for r in results + private)
    left = [p.name for p in (tmp_path / "run" / "cache").iterdir() if ".tmp-" in p.name or ".damaged" in p.name]
    assert not left


def test_a_blend_of_hundreds_of_sources(tmp_path: Path) -> None:
    weights = np.random.default_rng(3).uniform(0.2, 3.0, 320)
    blend: list[str | float] = []
    for number, weight in enumerate(weights):
        blend += [float(weight), write_documents(tmp_path / f"s{number}", [[number] * 20] * 12)]
    cfg = config(tmp_path, blend, loss_mask="plain", split="5,1")
    cfg.model.vocab_size, count = 320, 3200
    streams = build_streams(cfg, count, 0)
    found = Counter(row[0] for row in rows(streams.train, 0, count))
    for number, share in enumerate(weights / weights.sum()):
        assert abs(found[number] - share * count) < 2, number


def test_an_order_that_does_not_fit_in_memory_is_refused_before_the_work() -> None:
    dataset = object.__new__(EpochGPTDataset)
    dataset.num_samples, dataset.dataset_path = 10**13, "tiny"
    with pytest.raises(UserError, match=r"10,000,000,000,000 sequences of tiny, .* does not fit in memory"):
        dataset._order(np.ones(3, np.int32), np.arange(3), 10**10)


def test_batches_know_their_documents(tmp_path: Path) -> None:
    a = write_documents(tmp_path / "a", random_documents([5, 9, 3, 12] * 20))
    cfg = config(tmp_path, [a], document_attention=True)
    streams = build_streams(cfg, 4, 2)
    for stream in (streams.train, streams.valid[""]):
        batch = stream.micro_batches(0, 2, 2, 0, 1)[0]
        ids = batch.ids_bn.numpy()
        assert (ids[:, :-1] == EOD).any() and batch.starts_bn is not None and batch.edges is not None
        for row, starts in zip(ids, batch.starts_bn.tolist(), strict=True):
            expected = [max([0, *(j + 1 for j in range(i) if row[j] == EOD)]) for i in range(len(row))]
            assert starts == expected
