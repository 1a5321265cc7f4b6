"""`build`: from a configuration to the parts of a run, at the position where it continues."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megaponder.backbone.parts import implementations
from megaponder.checkpoint.ema import Ema
from megaponder.checkpoint.local import Local
from megaponder.checkpoint.save import Saver
from megaponder.checkpoint.state import TrainState
from megaponder.config.budget import last_step
from megaponder.config.model import short_reach
from megaponder.config.rules.depth_attention import unreached_sources
from megaponder.config.rules.freqkv import joined_documents
from megaponder.config.rules.run import tuned_wider
from megaponder.config.schema import RunConfig
from megaponder.data import chat, epochs, packing
from megaponder.data.blend import parse_blend, unread
from megaponder.data.check import check_data
from megaponder.data.sources import Opened
from megaponder.engine.groups import Groups
from megaponder.engine.step import Engine
from megaponder.engine.zero import Updates
from megaponder.monitor import identity
from megaponder.monitor.monitor import Monitor
from megaponder.monitor.phases import PhaseClock
from megaponder.monitor.pondered import Pondered
from megaponder.monitor.start_end import starting
from megaponder.ponder.settings import method_of
from megaponder.ranks import on_first_rank
from megaponder.training import engines, setup
from megaponder.training.batches import Batches
from megaponder.training.canary import Canary
from megaponder.training.faults import Faults
from megaponder.training.heartbeat import Heartbeat
from megaponder.training.lock import own_run
from megaponder.training.optimizer import method_only
from megaponder.training.profile import Profile
from megaponder.training.report import Report
from megaponder.training.resume import resume
from megaponder.training.same_data import SameData
from megaponder.training.schedule import Schedule, build_schedule
from megaponder.training.spent import Spent
from megaponder.training.stop import StopFlag
from megaponder.training.stragglers import Stragglers


@dataclass
class Run:
    """The parts of a run on this rank, and its position."""

    cfg: RunConfig
    total: int
    """Step at which the budget is spent."""
    state: TrainState
    """Position after the last step."""

    engine: Engine
    """Forward and backward of a global batch."""
    optimizer: Updates
    ema: Ema | None
    """Moving average of the weights."""
    schedule: Schedule
    """Learning rate by step."""
    data: SameData
    """The opened datasets, compared on all ranks."""
    batches: Batches
    """Training data in order, and the held-out data."""

    clock: PhaseClock
    """The current activity of this rank."""
    stop: StopFlag
    """Requests to stop, agreed by all ranks."""
    canary: Canary
    """FP8 against BF16, before the first step."""
    faults: Faults
    """Judges each step's numbers."""
    saver: Saver
    local: Local | None
    """Local checkpoints of this rank."""
    monitor: Monitor
    """Console, files, trackers, endpoint."""
    report: Report
    """Rows for the monitor."""
    spent: Spent
    """FLOPs and seconds of the steps."""
    profile: Profile
    who: identity.Identity
    """Id of the run and number of this start, for metrics."""


def build(cfg: RunConfig, groups: Groups, stack: ExitStack) -> Run:
    """All parts, loaded from the newest complete checkpoint if there is one; `stack` cleans up at the end.

    All ranks call this.  UserError for anything that `resume` rejects, for data that cannot be read and for a folder in
    use.
    """
    folder, total = Path(cfg.run), cfg.train.steps
    assert total is not None
    starting("data")
    clock = PhaseClock()
    stop = stack.enter_context(StopFlag(groups.device, folder))
    stack.enter_context(own_run(folder))
    stack.enter_context(Heartbeat(folder, clock, *setup.patience(cfg)))

    data = SameData(cfg)
    method = method_of(cfg)
    starting("model")
    built = setup.graphs_that_fit(cfg, method, groups.device, groups.world_size)
    engine, optimizer = engines.build(built, method, groups)
    ema = Ema(optimizer, cfg.optimizer.ema_decay) if cfg.optimizer.ema_decay else None
    starting("monitor")
    monitor = Monitor(cfg, total, setup.costs(cfg, method, groups.world_size), groups.logs(), clock)
    faults = Faults(cfg.faults, folder, monitor.say, groups.device)
    profile = stack.enter_context(Profile(cfg.logging, folder, groups.rank, partial(print, flush=True)))
    stragglers = Stragglers(cfg.faults.straggler_ratio, groups.device)

    starting("checkpoint")
    local = None
    if cfg.checkpoint.local is not None:
        local = Local(cfg, on_first_rank(lambda: identity.run_id(folder)), engine.stage, optimizer, ema)
    state, saved = resume(cfg, engine.stage, optimizer, data, monitor.say, ema, local)
    setup.refuse_other_disciplines(cfg, state.upcycled)
    total = monitor.total = last_step(cfg, state.step, state.sequences, state.tokens)
    schedule = build_schedule(cfg.schedule, cfg.optimizer, total)
    starting("data")
    batches = Batches(cfg, total, state, faults.record, groups, data.opened)
    starting("checkpoint")
    saver = Saver(folder / "checkpoints", cfg, engine.stage, optimizer, data.stored(), saved, monitor.saved, ema)
    starting("monitor")
    on_first_rank(lambda: setup.write_config(cfg))
    answers = cfg.data.loss_mask == "answers"
    sources = [source.path for source in parse_blend(cfg.data.train, "data.train")] if answers else []
    talks = [path for path in sources if data.opened[path].index.mask is not None]
    on_first_rank(lambda: chat.write(folder, chat.of_datasets((path, data.opened[path].meta) for path in talks)))
    on_data = _on_data(cfg, data.opened) if monitor.logs else []
    data.write(folder)
    stack.callback(monitor.close)
    who = on_first_rank(lambda: identity.start(folder))
    monitor.start(state.step, state.tokens, who)
    report = Report(cfg, total, schedule, engine, monitor, stragglers, Pondered(cfg, state.step, groups.logs()))

    monitor.say(implementations(built))
    if built is not cfg:
        monitor.say(
            "By the plan, captured passes would not fit in this GPU's memory; cuda_graphs: true captures them anyway."
        )
    for path in (p for blend in (cfg.data.train, *cfg.data.valid_blends().values()) for p in unread(blend)):
        monitor.say(f"The dataset {path} has weight 0 and is not read.")
    for sentence in on_data:
        monitor.say(sentence)
    unreached = unreached_sources(cfg, [p.layers for p in method.longest(cfg.train.seed)])
    for sentence in filter(None, (short_reach(cfg.model), joined_documents(cfg), unreached, tuned_wider(cfg))):
        monitor.say(sentence)
    if method_only(cfg.train, state.step + 1):
        last, name = cfg.train.method_only_steps, cfg.ponder.method
        monitor.say(f"Up to step {last} only the parameters of {name} itself are trained, then all of them.")
    if cfg.train.only:
        monitor.say(f"Only {', '.join(cfg.train.only)} are trained (train.only).")
    if state.step >= total:
        monitor.say(f"There is nothing to do: {state.step} steps are done, which is the whole budget of {total}.")
    profile.expect(total - state.step)
    canary = Canary(cfg, engine, monitor.say)
    return Run(
        cfg, total, state, engine, optimizer, ema, schedule, data, batches, clock, stop, canary, faults, saver, local,
        monitor, report, Spent(cfg, method, groups.world_size), profile, who,
    )  # fmt: skip


def _on_data(cfg: RunConfig, opened: dict[str, Opened]) -> list[str]:
    """Sentences about the conversations that are trained on, and how often each dataset is read."""
    train = check_data(cfg, opened).train
    talks = [source for source in train if source.conversations and cfg.data.loss_mask == "answers"]
    length = cfg.data.sequence_length
    filled = [packing.summary(one.path, opened[one.path].index, length, one.documents) for one in talks]
    return filled + epochs.summary(cfg, train, opened)
