"""The model without its head, for engines that keep keys and values themselves, such as vLLM's transformers backend.

Such an engine builds the class that `AutoModel` names, puts its own modules in place of tables and linear maps, and
serves each module that calls transformers' attention interface by its `layer_idx`.  So every layer has such a module in
each pass, and the engine is told of passes x layers.  The head is the engine's; a method that reads logits between
passes takes them from the table if the two are tied, otherwise from a second copy of the head.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megaponder.decoding.backbone import Backbone, Layer, feature
from megaponder.decoding.configuration import MegaponderConfig
from megaponder.decoding.method import DecodingMethod
from megaponder.decoding.paged import PagedRun, PagedView
from megaponder.decoding.passes import View

ENGINE = "vllm"
"""The attention that an engine names in the configuration before it builds the model."""
SECOND_HEAD = "second_head"
"""The field of config.json, and the module."""
SPLIT = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
"""How tensor parallelism divides the layers."""


def why_not(ponder: DecodingMethod) -> str:
    """Why such an engine cannot run this model; empty if it can."""
    config = ponder.config
    if not ponder.kv_passes():
        return (
            f"method {config.method} does not have exactly one row, with keys and values of its own, for each token in "
            "every pass"
        )
    if feature(config, "attention_window"):
        return f"attention_window = {config.attention_window}: sliding windows were not tried there"
    if feature(config, "freqkv"):
        return "FreqKV compresses keys, which are the engine's"
    if feature(config, "moe"):
        return "mixtures of experts were not tried there"
    if feature(config, "rotary_scaling").get("rope_type") == "dynamic":
        return "dynamic rotary scaling follows the length of one text, and all texts of a batch share one step there"
    return ""


def second_head(ponder: DecodingMethod) -> bool:
    """Whether passes read logits that no tied table gives."""
    return bool(getattr(ponder, "mixes", False)) and not ponder.config.tie_word_embeddings


class Map(nn.Module):
    """A linear map that engines leave as it is: they pack the weights of `nn.Linear`, which gates read in float32."""

    def __init__(self, given: nn.Linear):
        super().__init__()
        self.weight, self.bias = given.weight, given.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def left_alone(modules: nn.ModuleDict) -> nn.ModuleDict:
    """A method's modules with `Map` for `nn.Linear`."""
    for parent in list(modules.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                parent.add_module(name, Map(child))  # in place of the other
    return modules


class PassAttention(nn.Module):
    """Attention of one layer in one pass; the keys and values before are the engine's."""

    def __init__(self, config: MegaponderConfig, index: int):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, index, True
        self.scaling = config.head_size**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
        """[b, heads, r, d] of queries [b, heads, r, d] and this pass's keys and values [b, groups, r, d]."""
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, q, k, v, None, scaling=self.scaling, dropout=0.0, **given)
        return out.reshape(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)


@dataclass
class EngineView(PagedView):
    """A pass whose keys and values are the engine's."""

    def attend(self, module: Any, entry: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.pages[entry](q, k, v, self.given)


@dataclass
class EngineRun(PagedRun):
    """The passes of one forward in such an engine; `pages` are its `PassAttention`s."""

    def view(self, index: int = 0, slots: int = 1, alive: Tensor | None = None, weight: Tensor | None = None) -> View:
        assert slots == 1 and alive is None and weight is None
        given = (self.positions, None, None, None, None, self.pages, self.arguments)
        return EngineView(*given, of_all=self.earlier)


class _WithHead:
    """What methods want of a model, its head included."""

    def __init__(self, model: PonderModel):
        self.model = model

    @property
    def method(self) -> nn.ModuleDict:
        return self.model.method

    @property
    def method_entry(self) -> nn.ModuleDict:
        return self.model.method_entry

    @property
    def method_layers(self) -> nn.ModuleDict:
        return self.model.method_layers

    @property
    def training(self) -> bool:
        return False

    def lm_head(self, h: Tensor) -> Tensor:
        """Logits [..., V] of rows [..., H]."""
        if self.model.second_head is not None:
            return self.model.second_head(h)
        return F.linear(h, self.model.embed_tokens.weight[: self.model.config.vocab_size])  # an engine pads its table


class PonderModel(Backbone, PreTrainedModel):
    """A pondering language model without its head; a subclass says which method it decodes."""

    decoding: type[DecodingMethod]
    second_head: nn.Linear | None

    config_class = MegaponderConfig
    base_model_prefix = "model"
    _supports_attention_backend = _supports_sdpa = _supports_flash_attn = True
    _no_split_modules: ClassVar[list[str]] = ["Layer"]

    def __init__(self, config: MegaponderConfig):
        if config._attn_implementation != ENGINE:
            raise ValueError(
                "AutoModel: a pondering model without its head is for engines that keep keys and values, as vLLM does; "
                "use AutoModelForCausalLM"
            )
        own = copy.copy(config)
        # an engine builds the model twice with one configuration
        if not hasattr(config, "_layers_a_pass"):
            config._layers_a_pass = config.num_hidden_layers
        own.num_hidden_layers = config._layers_a_pass
        ponder = self.decoding(own)
        if lost := why_not(ponder):
            raise ValueError(f"vLLM's transformers backend cannot run this model: {lost}")
        if second_head(ponder) and not getattr(config, SECOND_HEAD, False):
            raise ValueError(
                f"method {config.method} reads logits between its passes, where vLLM's transformers backend keeps the "
                "head to itself: export the model with --target vllm, which writes a second copy of it"
            )
        super().__init__(own, config)
        self.ponder = ponder
        self.second_head = nn.Linear(own.hidden_size, own.vocab_size, bias=False) if second_head(ponder) else None
        self.method_entry = left_alone(nn.ModuleDict(ponder.entry_modules()))
        layers = range(own.num_hidden_layers)
        of_layers = {str(i): nn.ModuleDict(ponder.layer_modules(i)) for i in layers}
        self.method_layers = left_alone(nn.ModuleDict(of_layers))
        self.method = left_alone(nn.ModuleDict(ponder.modules()))
        config.num_hidden_layers = ponder.kv_passes() * len(layers)  # the engine's attentions
        self.attentions = nn.ModuleList(PassAttention(own, index) for index in range(config.num_hidden_layers))
        self._whole = _WithHead(self)
        PreTrainedModel.post_init(self)
        self._tp_plan = dict(SPLIT)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput | tuple[Tensor, ...]:
        """Final-normed rows [1, n, H] of tokens of many texts; further arguments go to the engine's attention."""
        if not all(isinstance(layer, Layer) for layer in self.layers):
            raise ValueError("pipeline parallelism: every pass needs all layers; use tensor parallelism")
        if getattr(self.ponder, "mixes", False) and len(self.embed_tokens.weight) < self.config.vocab_size:
            raise ValueError(
                f"tensor parallelism: method {self.config.method} reads the whole table between its passes, of which "
                "vLLM's transformers backend leaves each rank a part; use the plugin (tools/vllm_plugin)"
            )
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        assert tokens is not None and position_ids is not None
        run = EngineRun(position_ids, None, None, 0, {}, pages=self.attentions, arguments=kwargs)
        h = self.ponder.hidden(self._whole, tokens, run)
        return (h,) if return_dict is False else BaseModelOutput(last_hidden_state=h)
