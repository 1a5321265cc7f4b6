"""Batch and budget arithmetic: steps, sequences and tokens, with and without a batch ramp-up."""

from __future__ import annotations

from megaponder.config.schema import RunConfig, TrainConfig


def batch_at(train: TrainConfig, consumed: int) -> int:
    """Sequences in the step that starts after `consumed` sequences.

    The ramp-up [start, increment, sequences] goes from `start` to global_batch in equal parts of `sequences`.
    """
    full = train.global_batch
    if train.batch_rampup is None:
        return full
    start, increment, length = train.batch_rampup
    if consumed >= length or start >= full:
        return full
    stages = (full - start) // increment  # increments until the full batch
    return min(full, start + increment * (consumed * stages // length))


def sequences_after(train: TrainConfig, steps: int, consumed: int = 0) -> int:
    """Sequences consumed after `steps` more steps, starting from `consumed` sequences."""
    done = 0
    while done < steps and batch_at(train, consumed) < train.global_batch:
        consumed += batch_at(train, consumed)
        done += 1
    return consumed + (steps - done) * train.global_batch


def steps_for_tokens(cfg: RunConfig, tokens: int, consumed: int = 0) -> int:
    """Smallest number of steps that trains on at least `tokens` tokens, after `consumed` sequences."""
    return steps_for_sequences(cfg.train, -(-tokens // cfg.data.sequence_length), consumed)


def steps_for_sequences(train: TrainConfig, sequences: int, consumed: int = 0) -> int:
    """Smallest number of steps that trains on at least `sequences` more sequences, after `consumed`."""
    wanted = consumed + sequences
    steps = 0
    while consumed < wanted and batch_at(train, consumed) < train.global_batch:
        consumed += batch_at(train, consumed)
        steps += 1
    return steps + max(0, -(-(wanted - consumed) // train.global_batch))


def last_step(cfg: RunConfig, step: int, consumed: int, tokens: int) -> int:
    """Step at which the budget ends, for a run that has done `step` steps over `consumed` sequences and `tokens`
    tokens.

    That is train.steps, unless the budget is in tokens and earlier steps had another batch or length.
    """
    assert cfg.train.steps is not None
    if cfg.train.tokens is None:
        return cfg.train.steps
    return step + steps_for_tokens(cfg, max(0, cfg.train.tokens - tokens), consumed)


def total_tokens(cfg: RunConfig) -> int:
    """Tokens of the whole run; needs `train.steps` (see `resolve`)."""
    assert cfg.train.steps is not None
    return sequences_after(cfg.train, cfg.train.steps) * cfg.data.sequence_length
