"""The decoding form of a method: which passes run over new tokens, and what enters and leaves them.

A method's form is a subclass in the file `decoding.py` of the method's folder.

Shapes: b batch, n new tokens, H hidden.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from megaponder.decoding.backbone import wide
from megaponder.decoding.configuration import MegaponderConfig
from megaponder.decoding.passes import Run


class DecodingMethod:
    """A plain language model's one pass; methods override `hidden`, which returns one final-normed row per token."""

    name: ClassVar[str]
    defaults: ClassVar[dict[str, Any]] = {}
    """Options, and what a folder means that does not state them."""
    training_only: ClassVar[tuple[str, ...]] = ()
    """Options without effect here."""
    arguments: ClassVar[tuple[str, ...]] = ()
    """The method's own arguments of `forward` and `generate`, found in `Run.given`; None if not given."""
    config_fields: ClassVar[dict[str, Any]] = {}
    """The method's own fields of config.json, as an export writes them."""
    as_decoded: ClassVar[dict[str, Any]] = {}
    """Arguments of `forward` that make it compute full sequences as decoding does, token by token."""
    as_trained: ClassVar[dict[str, Any]] = {}
    """Options with which decoding skips nothing that training computes."""
    note: ClassVar[str] = ""
    """A paragraph for the model card; `$NAME` is replaced by an option."""
    needs_ids: ClassVar[bool] = False
    """Whether the ids of tokens matter beyond their rows of the table, so that no rows can take their place."""
    why_not_plain: ClassVar[str] = "it does more between two passes than run the same layers again"
    """Where `repeats` is 0, the reason why no plain model computes the same."""

    def __init__(self, config: MegaponderConfig):
        given = {name: value for name, value in config.method_options.items() if name not in self.training_only}
        if unknown := set(given) - set(self.defaults):
            raise ValueError(f"method {config.method} has no option {sorted(unknown)}; it has {sorted(self.defaults)}")
        self.config = config
        self.options = {**self.defaults, **given}

    @classmethod
    def repeats(cls, options: dict[str, Any]) -> int:
        """How often the layers run on their own output, if that is all the method does; otherwise 0."""
        return 0

    def kv_passes(self) -> int:
        """Passes with one row of keys and values for each token, if there are no other passes; otherwise 0."""
        return 0

    def modules(self) -> dict[str, nn.Module]:
        """What `exit_modules` of the training form builds; the model's `method`, its parameters are `method.NAME`."""
        return {}

    def entry_modules(self) -> dict[str, nn.Module]:
        """The same of the training form's `entry_modules`: `method_entry`."""
        return {}

    def layer_modules(self, layer: int) -> dict[str, nn.Module]:
        """The same of the training form's `layer_modules`: `method_layers[str(layer)]`."""
        return {}

    def check(self, given: dict[str, Any]) -> None:
        """ValueError for invalid values of `arguments`."""

    def using(self, given: dict[str, Any]) -> DecodingMethod:
        """The method as these `arguments` change it; ValueError for invalid values."""
        return self

    why_not_batched: ClassVar[str] = "it has no passes that tokens run by themselves"
    """Why there is no `stepwise` form: the end of a sentence."""

    def stepwise(self) -> Any:
        """The method as a `Stepwise` whose passes tokens can run by themselves; None if it has no such form."""
        return None

    def in_generation(self) -> dict[str, Any]:
        """Arguments of `forward` in `generate`, if the caller gives none."""
        return {}

    def hidden(self, model: Any, ids: Tensor, run: Run) -> Tensor:
        """[b, n, H] for ids [b, n].

        `model` is the PonderForCausalLM: its backbone `model`, its `lm_head`, and the method's own modules.
        """
        net = model.model
        return net.norm(net.stack(net.embed(net.words(ids), run.positions), 0, run.view()))

    def mixture(self, model: Any, h: Tensor, topk: int = 0, logits: Tensor | None = None) -> Tensor:
        """softmax(h Wo^T) (c We) over the vocabulary, or every token as likely as the topk-th; `logits`: h Wo^T."""
        logits = wide(model.lm_head(h)) if logits is None else logits
        if 0 < topk < logits.shape[-1]:
            least = logits.topk(topk, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        table = model.model.embed_tokens.weight[: logits.shape[-1]]  # an engine may have padded it
        return (logits.softmax(-1).to(h.dtype) @ table) * self.config.embedding_scale
