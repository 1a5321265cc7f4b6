"""What the training tests run inside worker processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from megaponder.config.load import from_mapping
from megaponder.config.schema import RunConfig
from megaponder.errors import UserError

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "family": "llama", "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 90,
        "vocab_multiple": 16, "tie_embeddings": True,
    },
    "ponder": {"method": "loop", "options": {"extra_passes": 1}},
    "data": {"sequence_length": 16, "eod_id": 0},
    "optimizer": {"lr": 1e-2, "tuned_passes": 1, "ema_decay": 0.75},
    "schedule": {"warmup_fraction": 0.2},
    "train": {"steps": 8, "global_batch": 4, "micro_batch": 2, "eval_every": 4, "eval_batches": 1},
    "checkpoint": {"every": 3, "keep_last": 10},
    "logging": {"every": 1, "tensorboard": False},
}  # fmt: skip


def config(run: str, data: str, **changes: Any) -> RunConfig:
    """A tiny run on the datasets <data>/train and <data>/valid; `changes` are dotted names with __ for the dot."""
    values: dict[str, Any] = {"run": run} | {name: dict(fields) for name, fields in SECTIONS.items()}
    values["data"] |= {"train": [f"{data}/train"], "valid": [f"{data}/valid"]}
    if "ponder__method" in changes:
        values["ponder"]["options"] = {}
    for name, value in changes.items():
        section, _, field = name.partition("__")
        values.setdefault(section, {})[field] = value
    return from_mapping(values)


def run_train(**job: Any) -> int:
    """Train once; the exit code."""
    from megaponder.training.job import train

    return train(config(**job))


def run_many(jobs: list[dict[str, Any]]) -> None:
    """Train several runs one after another: one start of the workers for all of them.

    It does what `train` does but leaves the world's process group in place, which starts only once in a process.
    """
    from megaponder.engine import groups as process_groups
    from megaponder.training import setup

    for job in jobs:
        print(f"== {job['run']}", flush=True)
        cfg = setup.complete(config(**job))
        groups = process_groups.init(cfg)
        from megaponder.training.loop import run

        run(cfg, groups)


def run_files(paths: list[str]) -> None:
    """`run_many` of configuration files."""
    from megaponder.config.load import load_config
    from megaponder.engine import groups as process_groups
    from megaponder.training import setup

    for path in paths:
        cfg = setup.complete(load_config(path))
        groups = process_groups.init(cfg)
        from megaponder.training.loop import run

        run(cfg, groups)


def average_and_export(run: str, last: int) -> None:
    """What `megaponder average` and `export --ema` write of a run, into folders beside it."""
    from megaponder.export.average import average
    from megaponder.export.to_hf import export

    print(average(run, f"{run}-mean", last=last))
    print(average(run, f"{run}-ema", ema=True))
    export(run, f"{run}-hf", ema=True)


def refusals(jobs: list[dict[str, Any]]) -> list[str]:
    """The sentence of each job's UserError; empty for one that trains."""
    sentences = []
    for job in jobs:
        try:
            run_train(**job)
            sentences.append("")
        except UserError as error:
            sentences.append(str(error))
    return sentences


def refusal_of_different_ranks(**job: Any) -> list[str]:
    """What `train` says where rank 1 has a field of its own, for each of some fields; no process gets further."""
    others: list[dict[str, Any]] = [
        {"optimizer__lr": 0.5},
        {"train__steps": 4},
        {"ponder__options": {"extra_passes": 2}},
    ]
    rank = os.environ["RANK"]
    return refusals([job | other if rank == "1" else job for other in others])


def refusal_of_other_code(code: str, **job: Any) -> list[str]:
    """What `train` says where rank 1, on a node of its own, runs other code."""
    from megaponder.training import versions

    if os.environ["RANK"] == "1":
        os.environ["LOCAL_RANK"], versions.CODE = "0", Path(code)
    return refusals([job])


def refusals_of_rank_0_alone(**job: Any) -> list[tuple[str, int]]:
    """What rank 0 of two says, and its exit code, if the other never comes, and if its port is taken."""
    found = []
    with socket.create_server(("", 0)) as server:
        taken = str(server.getsockname()[1])
        for port in (os.environ["MASTER_PORT"], taken):
            os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
            try:
                run_train(parallel__timeout_minutes=0.02, **job)
            except UserError as error:
                found.append((str(error), error.exit_code))
    return found


def refusal_of_one_rank(**job: Any) -> list[str]:
    """What each rank says where rank 1 alone lacks a dataset."""
    if os.environ["RANK"] == "1":
        job["data__train"] = [f"{job['data']}/absent"]
    return refusals([job])


def _before_step(at_step: int, action: Any) -> None:
    """Let `action(engine)` happen right before a step's computation."""
    from megaponder.engine.step import Engine

    original = Engine.forward_backward

    def wrapped(self: Engine, batches: Any, step: int, train: bool) -> Any:
        if train and step == at_step:
            action(self)
        return original(self, batches, step, train)

    Engine.forward_backward = wrapped  # type: ignore[method-assign]


def run_and_signal(at_step: int, number: int, rank: int | None, **job: Any) -> int:
    """Train, and let one rank, or each, get a signal inside a step; the exit code."""
    if rank is None or int(os.environ["RANK"]) == rank:
        _before_step(at_step, lambda _: os.kill(os.getpid(), number))
    return run_train(**job)


def run_with_nan(at_step: int, **job: Any) -> list[str]:
    """Train with weights that turn into NaN before a step; the error's sentence."""
    import torch

    def spoil(engine: Any) -> None:
        with torch.no_grad():
            next(engine.stage.parameters()).fill_(float("nan"))

    _before_step(at_step, spoil)
    return refusals([job])


def weights_of(checkpoint: str, **job: Any) -> dict[str, Any]:
    """State dict of a one-process model after a weights-only load."""
    from pathlib import Path

    from megaponder.engine import groups as process_groups
    from megaponder.training import setup

    cfg = setup.complete(config(**job))
    groups = process_groups.init(cfg)
    from megaponder.checkpoint import restore
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    engine = build_engine(cfg, method_of(cfg), groups)
    assert restore.load(Path(checkpoint), engine.stage) == ([], [])
    return {n: t.clone() for n, t in engine.stage.state_dict().items() if t is not None}


def spoil_after_async_save(at_step: int, **job: Any) -> None:
    """Train, and right after an asynchronous save has begun overwrite all parameters and moments."""
    import torch

    from megaponder.checkpoint import optimizer_state
    from megaponder.checkpoint.save import Saver

    original = Saver.save

    def save_and_spoil(self: Saver, state: Any) -> None:
        original(self, state)
        if state.step == at_step:
            with torch.no_grad():
                for part in optimizer_state.parts(self.optimizer):
                    for tensors in part.optimizer.state.values():
                        for tensor in tensors.values():
                            tensor.fill_(7.0)
                for parameter in self.stage.parameters():
                    parameter.fill_(7.0)

    Saver.save = save_and_spoil  # type: ignore[method-assign]
    run_train(**job)
