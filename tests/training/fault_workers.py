"""What the tests of faults run inside worker processes: jobs in which something goes wrong at a chosen moment."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megaponder.errors import UserError
from megaponder.monitor import jsonl
from tests.training.workers import _before_step, config

Fault = Callable[[Any, int, Any], Any]
"""(engine, step, output of the step) -> output; may spoil gradients, which lie in the engine's main_grad."""
_undo: list[Callable[[], None]] = []


def _replace(owner: Any, name: str, value: Any) -> None:
    original = getattr(owner, name)
    _undo.append(lambda: setattr(owner, name, original))
    setattr(owner, name, value)


def _in_training(fault: Fault, steps: set[int], times: int = 1) -> None:
    """Let a fault happen in these steps, each the first `times` that it is reached."""
    from megaponder.engine.step import Engine

    original, seen = Engine.forward_backward, dict.fromkeys(steps, 0)

    def forward_backward(self: Any, batches: Any, step: int, train: bool) -> Any:
        out = original(self, batches, step, train)
        if train and step in seen and seen[step] < times:
            seen[step] += 1
            out = fault(self, step, out)
        return out

    _replace(Engine, "forward_backward", forward_backward)


def nan_gradient(engine: Any, step: int, out: Any) -> Any:
    """One number of one rank's gradients is NaN."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        for parameter in engine.stage.parameters():
            parameter.main_grad.view(-1)[0] = float("nan")
    return out


def spike(engine: Any, step: int, out: Any) -> Any:
    """The loss is a hundred times what it was."""
    out.loss *= 100
    return out


def _memory(engine: Any, optimizer: Any) -> dict[str, Any]:
    """Copies of all parameters, moments, masters and counts."""
    from megaponder.checkpoint import optimizer_state

    found = {f"p.{n}": p.detach().clone() for n, p in engine.stage.named_parameters()}
    for i, part in enumerate(optimizer_state.parts(optimizer)):
        for j, state in enumerate(part.optimizer.state.values()):
            found |= {f"{i}.{j}.{n}": t.clone() if hasattr(t, "clone") else t for n, t in state.items()}
        for j, p in enumerate(p for g in part.optimizer.param_groups for p in g["params"]):
            found[f"{i}.{j}.held"] = p.detach().clone()
        found[f"{i}.count"] = [g.get("step") for g in part.optimizer.param_groups]
    return found


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what is not equal bit for bit."""
    import torch

    equal = {n: torch.equal(v, after[n]) if torch.is_tensor(v) else v == after[n] for n, v in before.items()}
    return [name for name, same in equal.items() if not same]


def _watch_memory(steps: set[int], found: dict[int, dict[str, Any]]) -> None:
    """Remember everything that a step could change, right before these steps' updates."""
    from megaponder.engine.step import Engine
    from megaponder.training import loop as module

    original, loop, run = Engine.forward_backward, module.loop, []

    def forward_backward(self: Any, batches: Any, step: int, train: bool) -> Any:
        if train and step in steps:
            with self.whole_parameters():
                found[step] = _memory(self, run[0].optimizer)
        return original(self, batches, step, train)

    _replace(module, "loop", lambda parts: (run.append(parts), loop(parts))[1])
    _replace(Engine, "forward_backward", forward_backward)


def _at_evaluation(number: int) -> None:
    """A signal arrives before the first batch of an evaluation."""
    from megaponder.monitor.phases import PhaseClock

    original = PhaseClock.enter

    def enter(self: Any, phase: str, *rest: Any) -> None:
        if phase == "evaluation":
            os.kill(os.getpid(), number)
        original(self, phase, *rest)

    _replace(PhaseClock, "enter", enter)


def _stall(first: int, meanwhile: Callable[[], None]) -> None:
    """Storage stalls when the batch that begins with sequence `first` is read, until `meanwhile` is done."""
    from megaponder.data.stream import SampleStream

    original = SampleStream.item

    def item(self: Any, index: int) -> Any:
        if index == first and self.field == "data.train":
            meanwhile()
        return original(self, index)

    _replace(SampleStream, "item", item)


def _signal_in_data(step: int, number: int) -> Callable[[], None]:
    """A signal once the run has come to this step's data, which are read ahead; then nothing, for ever."""
    from megaponder.monitor.phases import PhaseClock

    original, there = PhaseClock.enter, threading.Event()

    def enter(self: Any, phase: str, at: int | None = None) -> None:
        original(self, phase, at)
        if (phase, at) == ("data", step):
            there.set()

    _replace(PhaseClock, "enter", enter)

    def meanwhile() -> None:
        there.wait()
        os.kill(os.getpid(), number)
        time.sleep(1000)  # far longer than the test may take

    return meanwhile


def _until_told(run: Path) -> None:
    """Wait until rank 0 names the rank that it waits for and both have written their stacks, and keep these."""

    def told() -> bool:
        events, stacks = jsonl.read(run / "faults.jsonl"), [run / "stacks" / f"0000{r}.txt" for r in (0, 1)]
        named = any(e["event"] == "hang" and e["blame"].startswith("the others wait for rank 1 on ") for e in events)
        # what a slow machine wrote while it stood still before is overwritten
        return named and all(
            p.exists() and word in p.read_text() for p, word in zip(stacks, ("agreed", "wait"), strict=True)
        )

    end = time.monotonic() + 300
    while not told() and time.monotonic() < end:
        time.sleep(0.1)
    shutil.copytree(run / "stacks", run / "stacks-then")


def _full_disk(engine: Any, step: int, out: Any) -> Any:
    """From now on no file of this process and its children may grow beyond 100 kB."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    _undo.append(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)))
    return out


def _train(job: dict[str, Any], show: Callable[[UserError], Any] = str) -> Any:
    """The exit code, or the sentence of a UserError (what `show` makes of it)."""
    from megaponder.engine import groups as process_groups
    from megaponder.training import setup

    print(f"== {job['run']}", flush=True)
    try:
        cfg = setup.complete(config(**job))
        groups = process_groups.init(cfg)
        from megaponder.training.loop import run

        return run(cfg, groups)
    except UserError as error:
        return show(error)
    finally:
        while _undo:
            _undo.pop()()


def one_process(root: str, data: str) -> dict[str, Any]:
    """All faults that one process can have, one run after another; exit code or sentence of each."""
    results: dict[str, Any] = {}
    skip = {"faults__not_finite": "skip"}
    back = skip | {"faults__rollback_after": 2}

    def job(name: str, **changes: Any) -> None:
        results[name] = _train({"run": f"{root}/{name}", "data": data} | changes)

    _in_training(nan_gradient, {5, 6})
    job("rolled-back", **back)
    _in_training(nan_gradient, {5, 6})
    job("left-out", **back, faults__skip_data=True)
    for step in (6, 8):  # a later start, from before the window
        shutil.rmtree(f"{root}/left-out/checkpoints/step_{step:08d}")
    job("left-out", **back, faults__skip_data=True)
    _in_training(nan_gradient, {5, 6}, times=9)
    job("in-vain", **back, faults__max_rollbacks=1)
    _in_training(spike, {6})
    spikes = {"faults__spike": "skip", "faults__spike_window": 8, "faults__spike_sd": 8.0, "checkpoint__every": 6}
    job("spike", **spikes)
    job("spike", **spikes, train__steps=9)
    _at_evaluation(signal.SIGUSR1)
    job("evaluation")
    results["evaluation-first"] = results["evaluation"]
    job("evaluation")
    _at_evaluation(signal.SIGUSR1)
    job("evaluation-last", train__steps=4)
    results["evaluation-last-first"] = results["evaluation-last"]
    job("evaluation-last", train__steps=4)
    _stall(16, _signal_in_data(5, signal.SIGUSR2))
    job("stall", train__eval_batches=0)

    def stop_file(engine: Any, step: int, out: Any) -> Any:
        Path(root, "stop-file", "STOP").touch()
        return out

    _in_training(stop_file, {5})
    job("stop-file")
    _in_training(_full_disk, {5})
    job("full-disk")

    def long_metrics(engine: Any, step: int, out: Any) -> Any:
        with Path(root, "full-metrics", "metrics.jsonl").open("a") as file:
            file.write("\n" * 200_000)
        return _full_disk(engine, step, out)

    _in_training(long_metrics, {5})
    job("full-metrics", checkpoint__every=0)
    return results


LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"parallel__pipeline": 2},
    "bf16": {"precision__dtype": "bf16"},
    "distopt-overlap": {
        "parallel__distributed_optimizer": True, "parallel__overlap_grad_reduce": True,
        "parallel__overlap_param_gather": True,
    },
}  # fmt: skip


def _slow_forward(seconds: float) -> None:
    """Every forward takes this long by the clock that measures it, longer than any that a busy machine holds up."""
    from megaponder.engine import pipelined, stopwatch

    original, late = pipelined._forward, [0.0]

    def forward(*rest: Any) -> Any:
        late[0] += seconds
        return original(*rest)

    _replace(pipelined, "_forward", forward)
    _replace(stopwatch, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0]))


def two_processes(root: str, data: str) -> dict[str, Any]:
    """Skipped steps on each layout (names of what the step has changed), a slow rank and a stalled one."""
    from megaponder.training import setup

    last = os.environ["RANK"] == "1"
    results: dict[str, Any] = {}
    for name, changes in LAYOUTS.items():
        found: dict[int, dict[str, Any]] = {}
        _in_training(nan_gradient, {3})
        _watch_memory({3, 4, 5}, found)
        job = {"run": f"{root}/skip-{name}", "data": data, "faults__not_finite": "skip", "train__steps": 5} | changes
        results[f"skip-{name}"] = _train(job)
        for step in (3, 4):
            results[f"changed-{name}-{step}"] = _changes(found[step], found[step + 1])

    if last:
        _slow_forward(100.0)
    results["slow"] = _train({"run": f"{root}/slow", "data": data, "train__steps": 3, "train__eval_batches": 0})
    _replace(setup, "patience", lambda cfg: (6.0, 1000.0))
    if last:
        _stall(10, lambda: _until_told(Path(root, "stalled")))
    results["stalled"] = _train({"run": f"{root}/stalled", "data": data, "train__steps": 3, "train__eval_batches": 0})
    return results


def _before_reduction(at_step: int, fault: Callable[[], bool]) -> None:
    """Something happens where a step's gradients are to be reduced, which is left out unless it returns True."""
    from megaponder.engine.pipelined import Pipelined

    original, steps = Pipelined._finalize, iter(range(1, 1000))

    def finalize(self: Any, *rest: Any, **named: Any) -> None:
        if next(steps) != at_step or fault():
            original(self, *rest, **named)

    Pipelined._finalize = finalize  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], bool]] = {"left out": lambda: False, "late": lambda: time.sleep(1000) is None}
"""Of rank 1 in the reduction of step 3."""


def _hold(at_step: int, run: str) -> None:
    """This step's computation makes the file RUN.held and waits for RUN.go."""

    def wait(engine: Any) -> None:
        Path(f"{run}.held").touch()
        while not os.path.exists(f"{run}.go"):
            time.sleep(0.01)

    _before_step(at_step, wait)


def command(hang: float, deadline: float, fault: str = "", held: int = 0, publishes: bool = True, **job: Any) -> None:
    """`megaponder train` on a job, with other patience; ends with its exit code.

    In step `held` it makes the file RUN.held and waits for RUN.go; without `publishes` its first save does not end.
    """
    import sys

    from megaponder.cli.main import main
    from megaponder.config.load import dump
    from megaponder.training import setup

    setup.patience = lambda cfg: (hang, deadline)  # type: ignore[assignment]
    if held:
        _hold(held, job["run"])
    if not publishes:
        from megaponder.checkpoint.save import Saver

        _replace(Saver, "_publish", lambda *_: time.sleep(1000))
    if fault and os.environ["RANK"] == "1":
        _before_reduction(3, FAULTS[fault])
    path = f"{job['run']}-{os.environ['RANK']}.yaml"
    os.environ["MEGAPONDER_EXIT_FILE"] = f"{job['run']}.exit"
    dump(config(**job), path)
    sys.exit(main(["train", path]))


def checks_before(ports: list[int], **job: Any) -> list[str | None]:
    """Pre-flights of two processes: all well; another configuration on rank 1; no rank 1 at all.  The sentences."""
    from megaponder.training import preflight as module

    first, late = os.environ["RANK"] == "0", [0.0]

    def sleep(seconds: float) -> None:
        late[0] += 100.0
        time.sleep(seconds)

    def check(port: int, **changes: Any) -> str | None:
        os.environ["MASTER_PORT"] = str(port)
        try:
            module.preflight(config(**job | changes), 300.0)
        except UserError as error:
            return str(error)
        return None

    sentences = [check(ports[0]), check(ports[1], **{} if first else {"optimizer__lr": 0.5})]
    if first:  # whose time flies
        _replace(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], sleep=sleep))
        sentences.append(check(ports[2]))
    return sentences


def never_leaves(**job: Any) -> None:
    """A run whose process groups do not end."""
    from megaponder.training import job as module

    _replace(module.process_groups, "shutdown", lambda: time.sleep(600))
    _replace(module, "PATIENCE", 0.5)
    os.environ.pop("MEGAPONDER_EXIT_FILE", None)
    module.train(config(**job))


def restarted(fault: str, at_step: int, **job: Any) -> int:
    """`train` with an error on rank 1 in a step, the first time that it is reached; its exit code.

    `fault`: error, one that no sentence explains; mistake, one of the user's on both ranks; killed; hangs, in Python.
    """
    from megaponder.training import loop
    from megaponder.training.job import train

    update, seen = loop.update, []

    def faulty(optimizer: Any, norm: float) -> None:
        seen.append(norm)
        if len(seen) == at_step and fault == "mistake":
            raise UserError("It is full.")
        if len(seen) == at_step and os.environ["RANK"] == "1":
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            while fault == "hangs":
                time.sleep(0.1)
            raise ValueError("out of the blue")
        update(optimizer, norm)

    _replace(loop, "update", faulty)
    try:
        return train(config(**job))
    except UserError as error:
        print(f"error: {error}", flush=True)
        return error.exit_code
