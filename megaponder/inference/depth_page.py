"""What each pass of each token of a text predicted, as one HTML file: no script, no network."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaponder import files
from megaponder.decoding.backbone import wide
from megaponder.decoding.packed import packed
from megaponder.decoding.slots import Slots
from megaponder.decoding.steps import Stepwise
from megaponder.errors import UserError
from megaponder.inference.generate import Source, load

BEST = 3
"""Predictions shown for a pass."""


@dataclass(frozen=True)
class PassSeen:
    """One pass of one token."""

    nll: float | None
    """Negative log-likelihood of the next token, in nats, if the token stopped here; None for the last token."""
    best: tuple[tuple[str, float], ...]
    """The likeliest next tokens and their probabilities, if the token stopped here."""
    gate: float | None
    """What decided about the next pass: a gate's output, or a score less its threshold; None without a decision."""


@dataclass(frozen=True)
class TokenSeen:
    """One token and its passes."""

    text: str
    passes: tuple[PassSeen, ...]

    @property
    def depth(self) -> int:
        """Passes that it ran."""
        return len(self.passes)


@dataclass(frozen=True)
class TextSeen:
    """A text under a model."""

    model: str
    method: str
    deepest: int
    tokens: tuple[TokenSeen, ...]


@torch.no_grad()
def look(source: str | Path, text: str, tokenizer: str | None = None, trust_remote_code: bool = False) -> TextSeen:
    """Every pass of every token of `text` under a checkpoint, a run's newest one, or an export folder.

    UserError for an empty text, one longer than the model's longest sequence, or a method that has no passes.
    """
    loaded = load(source, tokenizer, None, trust_remote_code)
    own = getattr(loaded.model, "ponder", None)
    method = own and own.stepwise()  # of the folder's own code where the model comes from one
    if method is None or method.every or not method.separable:
        name = own.name if own else loaded.model.config.model_type
        raise UserError(f"{source}: {name} has no passes that could be shown one by one.")
    ids = loaded.tokenizer.encode_batch([text])[0]
    if not 0 < len(ids) <= loaded.max_positions:
        raise UserError(f"the text has {len(ids)} tokens; it must have 1 to {loaded.max_positions}.")
    passes = _passes(loaded, method, torch.tensor(ids, device=loaded.model.device))
    words = [loaded.tokenizer.decode([i]) for i in ids]
    tokens = tuple(TokenSeen(word, tuple(seen)) for word, seen in zip(words, passes, strict=True))
    return TextSeen(str(source), method.name, method.deepest(), tokens)


def _passes(loaded: Source, method: Stepwise, ids: Tensor) -> list[list[PassSeen]]:
    model, net = loaded.model, loaded.model.model
    left = torch.arange(len(ids), device=ids.device)
    slots, state = Slots(1, method.merge, device=ids.device), method.begin(model, ids, left)
    slots.extend(len(ids))
    seen: list[list[PassSeen]] = [[] for _ in ids]
    for index in range(method.deepest()):
        view = packed(slots, len(net.layers), index, torch.zeros_like(left), left, left)
        h = net.stack(state["x"][None], index, view)[0]
        stopped = dict(state)
        method.using({"passes": index + 1}).leave(model, index, h, stopped, left)
        shares = wide(model.lm_head(stopped["out"])).log_softmax(-1)
        go_on = method.leave(model, index, h, state, left)
        go_on = torch.full_like(left, go_on, dtype=torch.bool) if isinstance(go_on, bool) else go_on
        gates = _gates(model, method, index, state)
        best = shares.topk(min(BEST, shares.shape[-1]), dim=-1)
        for row, at in enumerate(left.tolist()):
            nll = -float(shares[row, ids[at + 1]]) if at + 1 < len(ids) else None
            words = [loaded.tokenizer.decode([i]) for i in best.indices[row].tolist()]
            likely = tuple(zip(words, best.values[row].exp().tolist(), strict=True))
            seen[at].append(PassSeen(nll, likely, None if gates is None else float(gates[row])))
        left, state = left[go_on], {name: x[go_on] for name, x in state.items()}
        if not len(left):
            break
        method.enter(model, index, state)
    return seen


def _gates(model: Any, method: Stepwise, index: int, state: dict[str, Tensor]) -> Tensor | None:
    """[m] what decided about the pass after `index`."""
    if index + 1 >= method.deepest():
        return None
    budget: Any
    limit, budget = getattr(method, "window", None), dict(model.method.items()).get("budget")
    if limit is not None:
        gate = index + 1 - limit.least
        if gate < 0 or not hasattr(budget, "score"):
            return None
        return budget.score(gate, state["out"] if "weight" in state else state["x"]) - budget.state[0]
    return state.get("reach", state.get("weight")) if method.halts else None


STYLE = """
body { font: 15px/2 system-ui, sans-serif; margin: 24px; max-width: 980px; color: #212529; background: #fff; }
h1 { font-size: 18px; line-height: 1.4; margin: 0 0 4px; } p { line-height: 1.5; margin: 0 0 14px; color: #495057; }
.text { white-space: pre-wrap; }
.t { position: relative; border-radius: 3px; padding: 1px 0; cursor: default; outline: none; }
.t:hover, .t:focus, .t:target { box-shadow: 0 0 0 1.5px #212529; z-index: 2; }
.tip { display: none; position: absolute; left: 0; top: 1.7em; z-index: 3; padding: 8px 10px; border: 1px solid #adb5bd;
  border-radius: 4px; background: #fff; color: #212529; font-size: 12px; line-height: 1.5; white-space: nowrap; }
.t:hover .tip, .t:focus .tip, .t:target .tip { display: block; }
td, th { padding: 0 10px 0 0; text-align: left; font-weight: normal; } th { color: #60686f; }
.key { border-radius: 3px; padding: 2px 8px; margin-right: 8px; }
"""


def page(seen: TextSeen) -> str:
    """The whole document."""
    tokens, title = seen.tokens, f"{seen.model}: {seen.method}"
    losses = [t.passes[-1].nll for t in tokens if t.passes[-1].nll is not None]
    mean = sum(t.depth for t in tokens) / len(tokens)
    facts = f"{len(tokens)} tokens, mean depth {mean:.2f} of {seen.deepest} passes"
    if losses:
        facts += f", mean NLL {sum(losses) / len(losses):.3f} nats"
    shares = Counter(t.depth for t in tokens)
    keys = "".join(
        f'<span class="key" style="{_shade(depth, seen.deepest)}">{depth} '
        f"{'pass' if depth == 1 else 'passes'}: {shares[depth] / len(tokens):.0%}</span>"
        for depth in range(1, seen.deepest + 1)
    )
    text = "".join(_token(i, token, seen.deepest) for i, token in enumerate(tokens))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1><p>{facts}. Point at a token for its passes: what "
        f'it would have predicted had it stopped there.</p><p>{keys}</p><div class="text">{text}</div></body></html>\n'
    )


def write(seen: TextSeen, path: Path) -> None:
    """Write the page; a browser never sees a partial file."""
    files.write_bytes(path, page(seen).encode())


def _shade(depth: int, deepest: int) -> str:
    """White to dark blue, with letters that stay legible."""
    share = 0.0 if deepest == 1 else (depth - 1) / (deepest - 1)
    return f"background: hsl(212, 80%, {96 - 56 * share:.0f}%); color: {'#fff' if share > 0.6 else '#212529'}"


def _token(number: int, token: TokenSeen, deepest: int) -> str:
    gated = any(p.gate is not None for p in token.passes)
    head = "<tr><th>pass</th><th>NLL</th>" + ("<th>gate</th>" if gated else "") + "<th>predictions</th></tr>"
    rows = "".join(_row(i + 1, p, gated) for i, p in enumerate(token.passes))
    name = escape(repr(token.text))
    tip = f'<span class="tip">{name}, depth {token.depth}<table>{head}{rows}</table></span>'
    shown = escape(token.text)
    style = _shade(token.depth, deepest)
    return f'<span class="t" id="t{number}" tabindex="0" style="{style}">{shown}{tip}</span>'


def _row(number: int, seen: PassSeen, gated: bool) -> str:
    nll = "" if seen.nll is None else f"{seen.nll:.3f}"
    gate = f"<td>{'' if seen.gate is None else f'{seen.gate:.3f}'}</td>" if gated else ""
    words = " ".join(f"{escape(repr(word))} {share:.2f}" for word, share in seen.best)
    return f"<tr><td>{number}</td><td>{nll}</td>{gate}<td>{words}</td></tr>"
