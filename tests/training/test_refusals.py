"""What stops a run, in words: damage, other models, NaN, and the options of resuming."""

from __future__ import annotations

import math
import shutil
import socket
import time

from megaponder.checkpoint import folder, manifest
from megaponder.training import versions
from tests.training.conftest import Base, run


def spoil(path) -> None:
    shard = next(path.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_skipped(base: Base):
    job = base.copy("damaged", upto=6)
    spoil(folder.final(base.root / "damaged" / "checkpoints", 6))
    _, output = run("run_train", 1, **job)
    assert "Skipped checkpoint" in output and "step_00000006" in output and "CRC-32 differs" in output
    assert f"Resuming from checkpoint {base.root}/damaged/checkpoints/step_00000003" in output
    assert base.rows("damaged")[8]["loss"] == base.rows()[8]["loss"]


def test_sentences_of_resuming(base: Base):
    def job(name: str, **changes):
        return {"run": str(base.root / name), "data": base.data, "train__steps": 2} | changes

    all_damaged = base.copy("all-damaged")
    spoil(folder.final(base.root / "all-damaged" / "checkpoints", 3))
    checkpoint = str(folder.final(base.run / "checkpoints", 3))
    vanilla = {"ponder__method": "vanilla", "checkpoint__load": checkpoint}
    jobs = [
        all_damaged,
        job("must", checkpoint__resume="must"),
        base.copy("never") | {"checkpoint__resume": "never"},
        base.copy("other") | {"model__ffn_size": 64},
        base.copy("longer") | {"data__sequence_length": 8, "train__steps": 4},
        job("load-nothing", checkpoint__load=str(base.root / "nowhere")),
        job("load", **vanilla),
        job("load-other", model__num_layers=3, checkpoint__load=checkpoint),
        job("untied", model__tie_embeddings=False, checkpoint__load=checkpoint),
        job(
            "gates",
            ponder__method="adaponderlm",
            ponder__options={"steps": 2, "target": 0.0, "gate_width": 4},
            checkpoint__load=checkpoint,
        ),
        job("scaled", model__embedding_scale=2.0, checkpoint__load=checkpoint),
        job("scaled-alike", model__embedding_scale=math.sqrt(2.5 * 32), checkpoint__load=checkpoint),
    ]
    (found,), output = run("refusals", 1, jobs=jobs)
    assert output.count("Skipped checkpoint") == 0 and found[0].count("Skipped checkpoint") == 1
    assert "is intact" in found[0] and "CRC-32 differs" in found[0] and "move them away" in found[0]
    assert found[1].startswith("checkpoint.resume = 'must'")
    assert found[2].startswith("checkpoint.resume = 'never'") and "earlier run" in found[2]
    assert found[3].startswith("model.ffn_size = 64")
    assert found[4] == "" and "Warning: data.sequence_length was 16" in output
    assert found[5].startswith("checkpoint.load = ")
    assert found[6] == "" and f"Starting from the weights of {checkpoint}." in output
    assert found[7].startswith("model.num_layers = 3") and found[7].endswith("was trained with 2; use that.")
    assert found[8].startswith("model.tie_embeddings = False") and found[9] == ""
    scales = [line for line in output.splitlines() if "embeddings were multiplied by 8.94427 up to" in line]
    # vanilla and adaponderlm scale otherwise by themselves, "scaled" was told to; "scaled-alike" is the same in numbers
    assert len(scales) == 3 and ", and by 1 from" in scales[0] and ", and by 2 from" in scales[2]
    _other_options(base, checkpoint)
    for name in ("all-damaged", "never"):
        assert folder.published(base.root / name / "checkpoints"), "nothing that existed was touched"


def _other_options(base: Base, checkpoint: str) -> None:
    """Gates of another shape or number: refused where a run goes on, told where weights are taken."""
    gates = base.root / "gates"
    again = {"run": str(gates), "data": base.data, "train__steps": 4, "ponder__method": "adaponderlm"}
    fresh = {"data": base.data, "train__steps": 1, "checkpoint__load": str(gates)}
    jobs = [
        again | {"ponder__options": {"steps": 2, "target": 0.0, "gate_width": 2}},
        again | {"ponder__options": {"steps": 1, "target": 0.0, "gate_width": 4}},
        again | {"ponder__options": {"steps": 3, "target": 0.0, "gate_width": 4}},
        fresh | {"run": str(base.root / "narrow"), "ponder__method": "adaponderlm"}
        | {"ponder__options": {"steps": 2, "target": 0.0, "gate_width": 2}},
        fresh | {"run": str(base.root / "gateless")},
    ]  # fmt: skip
    (found,), output = run("refusals", 1, jobs=jobs)
    others = ("it has tensor method_modules.gates", "this model has no parameter for its tensor", "it has no tensor")
    for i, what in enumerate(others):
        sentence = f"ponder.options = {jobs[i]['ponder__options']!r}: checkpoint {gates}/checkpoints/step_00000002 was "
        assert found[i].startswith(sentence + "trained with {'steps': 2, 'target': 0.0, 'gate_width': 4}, and " + what)
        assert found[i].endswith("; use those, or a new run folder.")
    assert "Warning: ponder.options" not in output
    assert "has tensor method_modules.gates" in found[3] and "where this model has" in found[3]
    assert found[4] == "" and "; ignored, since loop does not use them: method_modules.gates" in output


def test_ranks_with_different_configurations_are_refused(base: Base):
    """Each would train something else, and the sum would look like a run."""
    found, _ = run("refusal_of_different_ranks", 2, run=str(base.root / "different"), data=base.data)
    assert found[0] == found[1]
    for sentence, field in zip(found[0], ("optimizer.lr = 0.5", "train.steps = 4", "ponder.options = "), strict=True):
        assert sentence.startswith(field) and "rank 1 has this value, but rank 0 has" in sentence
    assert not (base.root / "different" / "metrics.jsonl").exists()


def test_nodes_with_other_code_are_refused(base: Base):
    """Two checkouts have one version number; a file more, another name or another byte makes another digest."""
    code = base.root / "code"
    digests = set()
    for name, text in (("a.py", "x = 1"), ("a.py", "x = 2"), ("sub/b.py", "x = 2")):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(text)
        digests.add(versions.code_digest(code))
    (code / "notes.txt").write_text("not code")
    assert len(digests) == 3 and versions.code_digest(code) in digests
    found, _ = run("refusal_of_other_code", 2, code=str(code), run=str(base.root / "other-code"), data=base.data)
    here, there = versions.code_digest(versions.CODE), versions.code_digest(code)
    assert found[0] == found[1]
    host = socket.gethostname()
    assert found[0][0].startswith(f"megaponder's code = {there} for rank 1 on {host}, but {here} for rank 0 on {host}")
    assert not (base.root / "other-code" / "metrics.jsonl").exists()


def test_what_one_rank_lacks_is_told_to_all(base: Base):
    """The others would wait for it until the process groups' time-out."""
    begin = time.monotonic()
    found, _ = run("refusal_of_one_rank", 2, run=str(base.root / "absent"), data=base.data)
    [here], [there] = found[1], found[0]
    assert "absent" in here and there == f"Rank 1 on {socket.gethostname()}: {here}"
    assert time.monotonic() - begin < 400, "sooner than the process groups' time-out"
    assert not (base.root / "absent" / "metrics.jsonl").exists()


def test_a_rank_that_never_comes_and_a_port_that_is_taken(base: Base):
    """The first is worth a restart, the second is not; neither is a bug with a traceback."""
    [found], _ = run("refusals_of_rank_0_alone", 1, run=str(base.root / "alone"), data=base.data)
    (absent, code), (taken, code_of_taken) = found
    assert absent.startswith("Another rank was lost, or never started, before the first step (") and code == 69
    assert "1/2 clients" in absent and absent.endswith("joined).") and "\n" not in absent
    assert taken.startswith("MASTER_PORT = ") and "another program" in taken and code_of_taken == 2
    assert not (base.root / "alone").exists()


def test_nan_stops_the_run_and_leaves_checkpoints_alone(base: Base):
    shutil.rmtree(base.root / "nan", ignore_errors=True)
    job = {"run": str(base.root / "nan"), "data": base.data, "parallel__pipeline": 2}
    found, _ = run("run_with_nan", 2, at_step=5, **job)
    assert found[0] == found[1] and found[0][0].startswith("Step 5: the loss is nan")
    assert list(folder.published(base.root / "nan" / "checkpoints")) == [3]
    assert max(base.rows("nan")) == 4
    run("run_train", 2, **job)
    assert abs(base.rows("nan")[8]["loss"] - base.rows()[8]["loss"]) < 1e-4


def test_what_was_moved_and_linked_back_works_or_is_refused(base: Base):
    """Nothing begins anew because a disk is not mounted; a configuration of a later version is told with its file."""
    root = base.root

    def moved(path, name: str) -> None:
        path.rename(root / name)
        path.symlink_to(root / name)

    jobs = {
        name: base.copy(f"links-{name}", upto=6) for name in ("work", "run", "checkpoints", "step", "newer")
    } | {"data": base.copy("links-data", upto=6)}  # fmt: skip
    work = root / "links-work"
    moved(work / "checkpoints" / "step_00000003", "third-disk")
    moved(work / "checkpoints", "second-disk")
    moved(work, "first-disk")
    jobs["work"]["checkpoint__keep_last"] = 1
    (root / "linked-data").mkdir()
    for path in [*base.run.parent.glob("train.*"), *base.run.parent.glob("valid.*")]:
        (root / "linked-data" / path.name).symlink_to(path)
    (root / "data-link").symlink_to(root / "linked-data")
    jobs["data"]["data"] = str(root / "data-link")
    for name, path in (("run", ""), ("checkpoints", "checkpoints"), ("step", "checkpoints/step_00000006")):
        moved(root / f"links-{name}" / path, f"unmounted-{name}")
        (root / f"unmounted-{name}").rename(root / f"gone-{name}")
    newer = root / "links-newer" / "checkpoints" / "step_00000006"
    config = newer / "config.yaml"
    config.write_text(config.read_text().replace("model:\n", "model:\n  windows: 3\n"))
    manifest.seal(newer)

    (found,), output = run("refusals", 1, jobs=list(jobs.values()))
    said = dict(zip(jobs, found, strict=True))
    assert said["work"] == "" and base.rows("links-work")[8]["loss"] == base.rows()[8]["loss"]
    assert [p.name for p in (root / "second-disk").iterdir()] == ["step_00000008"] and (root / "third-disk").is_dir()
    assert said["data"] == "" and "differs from the one" not in output
    for name, path in (("run", ""), ("checkpoints", "/checkpoints"), ("step", "/checkpoints/step_00000006")):
        assert f"{root}/links-{name}{path}" in said[name] and f"a link to {root}/unmounted-{name}" in said[name], said
        assert "which does not exist; restore the target" in said[name]
    assert list(folder.published(root / "links-step" / "checkpoints")) == [6, 3]
    assert said["newer"].startswith(f"{config}: model.windows = 3: there is no such field")
