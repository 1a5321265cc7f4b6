"""Self-speculation writes the greedy text of full depth, whatever early passes predict."""

from __future__ import annotations

import pytest
import torch

from megaponder.errors import UserError
from megaponder.inference.speculate import speculate
from tests.export import models
from tests.inference.test_batching import METHODS, alone, prompts
from tests.layouts.cases import WHOLE

FEW = ("nanbeige", "ponderlm_top", "adaponderlm")


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("vanilla", *models.LATENT) and (WHOLE or m in FEW)])
def test_text_is_that_of_full_depth(method: str) -> None:
    for family in models.FAMILIES if WHOLE else ("llama",):
        net = models.model(family, method, method_options=METHODS[method]).double()
        for prompt in prompts()[2:4]:
            want, _ = alone(net, prompt)
            for drafted, by in ((1, 1), (4, 1), (5, 2)):
                got = speculate(
                    net, prompt, len(want), drafted=drafted, by=min(by, net.ponder.stepwise().deepest() - 1)
                )
                assert got.tokens == want
                assert -(-len(want) // drafted) <= got.rounds <= len(want)
            end = speculate(net, prompt, len(want), drafted=4, eos=want[4])
            assert end.tokens == want[: want.index(want[4]) + 1]


def test_a_call_decides_whether_loops_of_ouro_can_be_left_out() -> None:
    for options, given in (({"skips_loops": False}, {}), ({"skips_loops": True}, {"threshold": 0.7})):
        net = models.model("llama", "ouro", method_options={"loops": 3, "threshold": 1.0, **options}).double()
        want, _ = alone(net, prompts()[2], **given)
        assert speculate(net, prompts()[2], len(want), drafted=3, **given).tokens == want
    with pytest.raises(UserError, match="method ouro has no early passes that could draft"):
        speculate(models.model("llama", "ouro", method_options={"loops": 3}), [1], 3, threshold=0.7)


def test_drafts_that_hold_save_rounds() -> None:
    """Where later passes change nothing, every draft holds."""
    net = models.model("llama", "ponderlm").double()
    with torch.no_grad():
        net.ponder.mixture = lambda model, h, *rest: torch.zeros_like(h)
    got = speculate(net, prompts()[1], 12, drafted=4)
    assert got.rounds == 3 and got.mean_length == 4
    assert got.tokens == alone(net, prompts()[1], max_new_tokens=12)[0]


def test_mistakes() -> None:
    net = models.model("llama", "loop")
    with pytest.raises(UserError, match="by = 3: it must be at least 1 and less than the 3 passes of a token"):
        speculate(net, [1], 3, by=3)
    with pytest.raises(UserError, match="drafted = 0"):
        speculate(net, [1], 3, drafted=0)
    for method in ("pause", "ponderlm2"):
        with pytest.raises(UserError, match=f"method {method} has no early passes"):
            speculate(models.model("llama", method), [1], 3)
