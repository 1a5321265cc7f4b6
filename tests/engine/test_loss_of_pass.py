"""The loss of an earlier pass is the loss of the model with fewer passes, on the same weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_workers

METHODS = [("loop", "extra_passes"), ("ponderlm", "steps")]


def losses(method: str, option: str) -> list[dict[str, Any]]:
    """In a worker: evaluation of models with 1 to 3 further passes, all with the first one's weights."""
    import torch

    from megaponder.config.resolve import resolve
    from megaponder.config.schema import ModelConfig, RunConfig
    from megaponder.data.batch import MicroBatch
    from megaponder.engine import groups
    from megaponder.engine.cuda_on_cpu import install

    install()
    from megaponder.engine.build import build_engine
    from megaponder.ponder.settings import method_of

    draw = torch.Generator().manual_seed(3)
    text = torch.randint(0, 90, (2, 17), generator=draw)
    batch = MicroBatch(text[:, :-1], text[:, 1:], torch.ones(2, 16))
    weights, out = None, []
    for passes in (1, 2, 3):
        cfg = RunConfig(model=ModelConfig(preset="llama-tiny", vocab_size=96, init_std=0.2))
        cfg.ponder.method, cfg.ponder.options = method, {option: passes}
        cfg.data.sequence_length, cfg.train.steps, cfg.train.global_batch, cfg.train.micro_batch = 16, 1, 2, 2
        cfg = resolve(cfg)
        engine = build_engine(cfg, method_of(cfg), groups.init(cfg))
        weights = weights or [p.detach().clone() for p in engine.stage.parameters()]
        with torch.no_grad():
            for parameter, value in zip(engine.stage.parameters(), weights, strict=True):
                parameter.copy_(value)
        seen = engine.forward_backward([batch], 0, train=False)
        out.append({"loss": seen.loss, **seen.stats})
        assert not engine.forward_backward([batch], 0, train=True).stats  # in training nothing is spent on it
    return out


@pytest.mark.parametrize(("method", "option"), METHODS)
def test_loss_of_a_pass_is_that_of_the_shorter_model(method: str, option: str) -> None:
    args = {"method": method, "option": option}
    one, two, three = run_workers("tests.engine.test_loss_of_pass:losses", 1, args=args)[0]
    assert two["loss_pass1"] == pytest.approx(one["loss"], rel=1e-6)
    assert three["loss_pass1"] == pytest.approx(one["loss"], rel=1e-6)
    assert three["loss_pass2"] == pytest.approx(two["loss"], rel=1e-6)
    assert len({round(x, 4) for x in (one["loss_pass0"], one["loss"], two["loss"], three["loss"])}) == 4
