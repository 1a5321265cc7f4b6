"""The model: embedding, layers, final norm and head of one pipeline stage, and how a pass runs through them.

    pass k    embed     method.enter: token embeddings, or what pass k - 1 fed back       first stage
              layers    this stage's share of the stack, the method's view of attention   every stage
              feed      method.leave: the feedback that pass k + 1 starts with            last stage
              read      method.readout (final norm), head, loss                           last stage, last pass

All passes run on the same parameters, which are built once.  `backbone.layer` defines what a layer computes.

Shapes: n tokens, s rows of this rank (n * slots, divided by TP under sequence parallelism), b micro-batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megaponder.backbone.config import head_config, transformer_config, use_te
from megaponder.backbone.context import Context
from megaponder.backbone.documents import Documents
from megaponder.backbone.embedding import Embedding, rotary_embedding
from megaponder.backbone.freqkv import turns as freqkv_turns
from megaponder.backbone.layer import Kept, Reads, layer_spec
from megaponder.backbone.moe import Routed
from megaponder.backbone.parts import parts
from megaponder.config import disciplines, eslm
from megaponder.config.recompute import offloaded, recomputed_layers
from megaponder.config.rules.precision import fp8_alignment
from megaponder.config.schema import RunConfig
from megaponder.decoding import freqkv_blocks, moe_options
from megaponder.engine import loss, selection
from megaponder.engine.active_rows import Attending, Rows, unit_of
from megaponder.engine.balance import Balance
from megaponder.engine.depth_attention import EarlierLayers
from megaponder.engine.fp8 import Fp8
from megaponder.engine.groups import Groups
from megaponder.engine.method_tools import StageEntryTools, StageExitTools, run_pre_hooks
from megaponder.engine.objective import Objective, objective
from megaponder.engine.shared_embedding import InputTable
from megaponder.engine.stash import PassState
from megaponder.ponder.base import Flow, Method, Pass, Readout

if TYPE_CHECKING:
    from megaponder.data.batch import MicroBatch


Hook = Callable[[Tensor], Tensor]
Z_LOSS = "loss_z"
"""Training statistic: the z-loss of the logits that the last pass reads."""
LOSS_OF_PASS = "loss_pass"
"""Evaluation statistic: the loss if the model read out an earlier pass."""


def loss_of_pass(p: Pass) -> str:
    """Its name, `loss_pass` and the pass's index."""
    return f"{LOSS_OF_PASS}{p.index}"


def is_watched(p: Pass, method: Method) -> bool:
    """Whether the loss of an earlier pass is meaningful: every token runs it, with one row."""
    return not p.last and p.slots == 1 and p.reads is None and not method.skips and method.core is None


def _cut(p: Pass, flow: Flow) -> Flow:
    """What a pass without gradient passes on."""
    if p.grad:
        return flow
    return Flow(flow.rows.detach(), None if flow.riders is None else flow.riders.detach(), flow.earlier)


class PonderStage(MegatronModule):
    """Embedding (first stage), layers, final norm, head and the method's modules (last stage)."""

    def __init__(self, cfg: RunConfig, method: Method, groups: Groups, embedding_scale: float):
        super().__init__(config=transformer_config(cfg))
        m, built = cfg.model, parts(self.config, use_te(cfg.precision))
        self.method, self.groups, self.embedding_scale = method, groups, embedding_scale
        self.context = Context(groups.cp) if groups.cp_size > 1 else None
        assert m.num_layers is not None
        self.num_layers = m.num_layers
        self.skip_halted = cfg.ponder.skip_halted
        self.z_loss, self.earlier_layers = cfg.train.z_loss, EarlierLayers(cfg)
        self.before_use: Callable[[nn.Module], None] = run_pre_hooks
        """Called with a module whose weight is then read without calling it."""
        self.log_normaliser: Tensor | None = None
        """Of the logits that were read last [n, b]."""
        self.entropy: Tensor | None = None
        """Theirs, where tokens are selected by it [n, b]."""
        options = eslm.read(cfg.train.eslm)
        self.selection = None if options is None else selection.Selection(options, groups)
        """Which tokens training leaves out."""
        self.row_multiple = 1 if cfg.precision.fp8 == "none" else fp8_alignment(cfg.precision.fp8)
        """The number of rows of a pass must be a multiple of this, gathered or not."""
        self.places: int | None = None
        """Places for active tokens in the next pass (`engine.active_rows`); None: counted when needed."""
        assert m.vocab_size is not None
        self.vocab_size, self.tied, rows = m.vocab_size, bool(m.tie_embeddings), m.padded_vocab
        first, last = self.pre_process, self.post_process = groups.is_first_stage, groups.is_last_stage

        if first:
            self.embedding = Embedding(self.config, rows, embedding_scale, m.learned_positions, groups.tp)
        self.rotary, self.freqkv = rotary_embedding(self.config, m), freqkv_blocks.read(m.freqkv)
        self.decoder = TransformerBlock(
            self.config,
            TransformerBlockSubmodules(layer_specs=[layer_spec(m, built)] * get_num_layers_to_build(self.config)),
            post_layer_norm=False,
            pre_process=first,
            post_process=last,
        )
        self.recomputed = partial(recomputed_layers, cfg, layers=len(self.decoder.layers))
        self.offloaded = partial(offloaded, cfg)
        self.balance: Balance | None = None
        if (experts := moe_options.read(m.moe)) is not None:
            mixtures = [(int(layer.layer_number) - 1, layer.mlp) for layer in self.decoder.layers]
            labels = disciplines.read(cfg.train.disciplines)
            self.balance = Balance(experts, mixtures, m.num_layers, method.core, labels)
        if last:
            self.final_norm = built.norm(self.config, self.config.hidden_size, self.config.layernorm_epsilon)
            self.output_layer = ColumnParallelLinear(
                self.config.hidden_size,
                rows,
                config=head_config(self.config),
                init_method=self.config.init_method,
                bias=False,
                skip_weight_param_allocation=self.tied,
                tp_group=groups.tp,
            )

        self._build_method(cfg.train.seed)
        self.fp8 = Fp8(cfg, self.decoder.layers) if cfg.precision.fp8 != "none" else None
        for module in self.decoder.modules():
            # Transformer Engine then adds to the gradients of earlier passes; FP8 weights are updated by `engine.fp8`
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = False

        # megatron-core sums this weight's gradient over the first and last stage when the flag is set
        self.share_embeddings_and_output_weights = groups.pp_size > 1 and (self.tied or method.mixes_vocabulary)
        if self.share_embeddings_and_output_weights:
            if last:
                self.input_table = InputTable(self.config, rows, groups.tp)
            elif first:
                self.embedding.word_embeddings.weight.shared_embedding = True

    def _build_method(self, seed: int) -> None:
        """The method's own parameters, under names that begin with `ponder.base.PARAMETER_PREFIX`.

        They are replicated on all tensor ranks.  Outside the layers a rank's gradient is the full one or, under
        sequence parallelism, its tokens' share, which megatron-core sums; in a layer it is always the share of the
        rank's heads.
        """

        def build(modules: Callable[[], dict[str, nn.Module]], seed: int) -> nn.ModuleDict:
            with torch.random.fork_rng(devices=[]):  # the same start on every rank and every device
                torch.default_generator.manual_seed(seed)
                return nn.ModuleDict(modules())

        outer = []
        if self.pre_process:
            self.method_entry = build(self.method.entry_modules, seed + 1)
            outer += list(self.method_entry.parameters())
        if self.post_process:
            self.method_modules = build(self.method.exit_modules, seed)
            outer += list(self.method_modules.parameters())
        for parameter in outer:
            parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        numbers = [int(layer.layer_number) - 1 for layer in self.decoder.layers]
        self.method_layers = nn.ModuleDict(
            {str(i): build(partial(self.method.layer_modules, i), seed + 2 + i) for i in numbers}
        )
        if self.groups.tp_size > 1:
            for parameter in self.method_layers.parameters():
                parameter.register_hook(self._sum_of_heads)

    def _sum_of_heads(self, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=self.groups.tp)
        return gradient

    # --- weights used in more than one place
    # ---------------------------------------------------------------------------
    def _table_module(self) -> nn.Module:
        return self.input_table if hasattr(self, "input_table") else self.embedding.word_embeddings

    def table_weight(self) -> Tensor:
        """Input table of this stage (first: its own; last: its copy): [V_padded/tp, H]."""
        self.before_use(self._table_module())
        return self.shared_embedding_or_output_weight()

    def head_weight(self) -> Tensor:
        """Output head: [V_padded/tp, H]."""
        if self.tied:
            return self.table_weight()
        self.before_use(self.output_layer)
        return self.output_layer.weight

    def shared_embedding_or_output_weight(self) -> Tensor:
        """megatron-core's name for the weight whose gradient first and last stage share."""
        weight = self._table_module().weight
        assert isinstance(weight, Tensor)
        return weight

    def set_input_tensor(self, tensor: Any) -> None:
        """megatron-core's schedules call this on whatever they wrap; passes get their input as an argument."""

    # --- one pass -----------------------------------------------------------------------------------------------------
    def run_pass(
        self,
        p: Pass,
        batch: MicroBatch,
        incoming: Flow | None,
        state: PassState,
        step: Tensor | None,
        watched: bool = False,
    ) -> Flow | Readout:
        """Pass p of this stage's layers; `state` is read, and updated for the next pass.

        `incoming`: feedback of the previous pass (first stage, None in pass 0) or the previous stage's rows.
        Returns the message for the next stage or pass, or the readout (last stage, last pass).  `watched`: the last
        stage also records the loss that the model would have if it read out this pass.
        """
        entry_tools, exit_tools = StageEntryTools(self, batch, step), StageExitTools(self, batch, step)
        into_core = into_coda = None
        if self.groups.is_first_stage:
            with self._gradients(p, begins=True):
                flow = self.method.enter(p, batch.ids_bn, incoming, state.entry, entry_tools)
            into_core = lambda rows: self.method.into_core(p, rows, state.entry, entry_tools)  # noqa: E731
        else:
            assert incoming is not None
            flow = incoming
        if self.groups.is_last_stage and p.last:
            into_coda = lambda rows: self.method.into_coda(p, rows, state.exit, exit_tools)  # noqa: E731
        documents = self._documents(batch)
        earlier = () if incoming is None else incoming.earlier
        carried, counted = (batch.ids_bn.t(), earlier, state.kept), self._counted(p, batch)
        labels = None if self.balance is None or self.balance.disciplines is None else batch.disciplines_b
        hooks = into_core, into_coda
        rows, state.kept, earlier = self._layers(p, flow, *carried, *hooks, documents, counted, labels)
        flow = _cut(p, Flow(rows, flow.riders, earlier))
        if not self.groups.is_last_stage:
            return flow
        if p.last:
            return self.method.readout(p, flow.rows, flow.riders, state.exit, exit_tools)
        if watched:
            state.exit[loss_of_pass(p)] = self.token_losses(exit_tools.norm(flow.rows), batch)
        left = self.method.leave(p, flow.rows, flow.riders, state.exit, exit_tools)
        return _cut(p, Flow(left.rows, left.riders, earlier if self.earlier_layers.across else ()))

    def _documents(self, batch: MicroBatch) -> Documents | None:
        """Who sees whom; None: each row all rows before it."""
        if self.context is None:
            return None if batch.starts_bn is None else Documents(batch.starts_bn, batch.edges)
        return Documents(batch.starts_bn, None, batch.places_n, self.context.size)

    def _counted(self, p: Pass, batch: MicroBatch) -> Tensor | None:
        """With a mixture of experts: the share of a token that counts which each row of this rank is [s, b]."""
        if self.balance is None:
            return None
        counted = (batch.loss_mask_bn.t() / p.slots).repeat_interleave(p.slots, dim=0)
        return counted.chunk(self.groups.tp_size)[self.groups.tp_rank] if self.config.sequence_parallel else counted

    @staticmethod
    def _gradients(p: Pass, begins: bool = False) -> AbstractContextManager[Any]:
        """Whether what runs inside has gradients; `begins`: it lies before the core, which pass 0 always trains."""
        return nullcontext() if p.grad or (begins and p.index == 0) else torch.no_grad()

    def _riders_in_attention(self, riders: Tensor | None) -> Tensor | None:
        """Riders of the full sequence."""
        return None if riders is None else self._in_every_head(riders)

    def _in_every_head(self, x: Tensor) -> Tensor:
        """Rows of the full sequence; each tensor rank's heads contribute to their gradient, which is summed."""
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.groups.tp)
        return copy_to_tensor_model_parallel_region(x, group=self.groups.tp)

    def _block_inputs(self, layer: Any, x: Tensor, channels: int) -> Tensor:
        """The first channels of what a layer's attention projects, of all rows: normed, unless no norm stands before.

        Transformer Engine norms inside of the projection, so the few channels are normed once more here.
        """
        norm, inside = layer.input_layernorm, layer.self_attention.linear_qkv
        weight, bias = (getattr(inside, f"layer_norm_{name}", getattr(norm, name, None)) for name in ("weight", "bias"))
        y = x.float()
        if weight is not None:
            y = y - y.mean(-1, keepdim=True) if self.config.normalization == "LayerNorm" else y
            scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
            y = y[..., :channels] * scale * weight[:channels].float()
            y = y if bias is None else y + bias[:channels].float()
        return self._in_every_head(y[..., :channels].to(x.dtype))

    def _rotary(self, p: Pass, rows: int, documents: Documents | None) -> Tensor | None:
        """`fused.turns` [2, rows, 1 or b, 1, d_rot]; all slots of a token share its position.

        With FreqKV, for texts beyond its capacity, those of a cache's rows (see `freqkv.turns`).
        """
        if self.rotary is None:
            return None
        if self.freqkv is not None and rows > self.freqkv.capacity:
            return freqkv_turns(self.freqkv, self.rotary(self.freqkv.capacity), documents)
        turn = self.rotary(rows // p.slots * self.groups.cp_size)
        if documents is not None:
            turn = turn[:, :, 0][:, documents.positions_bn.t()]
        return turn if p.slots == 1 else turn.repeat_interleave(p.slots, dim=1)

    def gathered(self, active: Tensor | None) -> Rows | None:
        """Places of this rank's active tokens [s, b]; None if all rows run: no token halts, or halting only masks."""
        if active is None or not self.skip_halted:
            return None
        if self.places is not None and self.places >= active.shape[0]:
            return None
        unit = unit_of(self.row_multiple, active.shape[1])
        rows = Rows(active, self.groups.tp if self.config.sequence_parallel else None, self.places, unit)
        return None if rows.covers_all else rows

    def _layers(
        self,
        p: Pass,
        flow: Flow,
        ids_nb: Tensor,
        given: Sequence[Tensor],
        kept: Sequence[Kept],
        into_core: Hook | None,
        into_coda: Hook | None,
        documents: Documents | None,
        counted: Tensor | None,
        disciplines_b: Tensor | None,
    ) -> tuple[Tensor, list[Kept], tuple[Tensor, ...]]:
        """This stage's share of the pass's layers; the hooks run before its first layer of the core and of the coda.

        `given`, and the last of the results: `Flow.earlier`.
        """
        x, out = flow.rows, []
        riders = self._riders_in_attention(flow.riders)
        whole = x.shape[0] * (self.groups.tp_size if self.config.sequence_parallel else 1)
        rotary = self._rotary(p, whole, documents)
        active, rows = self.method.active(p, riders), None
        running = self.method.active(p, flow.riders)
        own = self.gathered(running)
        if counted is not None and running is not None:
            counted = counted * running
        if own is not None:
            rows = own.all_gather()
            x, counted = own.gather(x), None if counted is None else counted.gather(0, own.index)
            if rotary is not None:
                column = torch.arange(rotary.shape[2], device=x.device)  # one for all sequences, or each its own
                rotary = rotary[:, rows.index, column]
        earlier, recomputed = self.earlier_layers.begin(given, rows), self.recomputed(p.index)
        begin, end = self.method.core or (0, self.num_layers)
        for i, layer in enumerate(self.decoder.layers):
            number = int(layer.layer_number) - 1
            if into_core is not None and number >= begin:
                x, into_core = self._into_core(p, x, into_core), None
            if into_coda is not None and number >= end:
                x, into_coda = into_coda(x), None
            before = kept[i] if kept else ()
            if p.layers is not None and not p.layers[0] <= number < p.layers[1]:
                out.append(() if p.last else before)
                continue
            precision = self.fp8.layer(i) if self.fp8 else nullcontext
            final = number == self.num_layers - 1
            reads = (p.slots, p.reads) if final and p.reads is not None else None

            def run(
                x: Tensor,
                riders: Tensor | None,
                *carried: Tensor,
                layer: Any = layer,
                count: int = len(before),
                number: int = number,
                reads: Reads | None = reads,
                precision: Callable[[], AbstractContextManager[Any]] = precision,
            ) -> tuple[Tensor, Kept, Kept, Routed | None]:
                def attend(q: Tensor, k: Tensor, v: Tensor, kept: Kept, core: Any) -> tuple[Tensor, Kept]:
                    own: Any = self.method_layers[str(number)]
                    first = self.groups.tp_rank * k.shape[2]
                    inputs = partial(self._block_inputs, layer, x)
                    place = (number, own, p.slots, ids_nb, slice(first, first + k.shape[2]), inputs)
                    attending = Attending(core, rows, active, *place, documents, self.context)
                    return self.method.attend(p, q, k, v, riders, kept, attending)

                with precision():  # inside `run`, so that a recomputed layer enters it again
                    routing = counted, disciplines_b, p.steps
                    return layer(x, rotary, attend, carried[:count], reads, carried[count:], *routing)

            with self._gradients(p, begins=into_core is not None):
                if i < recomputed and torch.is_grad_enabled():
                    # non-reentrant, with carried tensors as explicit inputs and outputs: gradients stay exact
                    carried = (*before, *earlier.sources())
                    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
                    with self.kept_in_main_memory(p.index):  # what `checkpoint` keeps: these inputs
                        x, left, made, routed = again(run, x, riders, *carried)
                else:
                    x, left, made, routed = run(x, riders, *before, *earlier.sources())
                if self.balance is not None:  # not in `run`, which counts a recomputed layer twice
                    x = self.balance.add(number, x, routed)
            earlier.add(number, made)
            out.append(() if p.last else left)
        if into_core is not None:  # the stage holds the prelude alone
            x = self._into_core(p, x, into_core)
        if into_coda is not None:  # there is no coda
            x = into_coda(x)
        read_out = p.last and self.groups.is_last_stage
        return (x if own is None else own.scatter(x, flow.rows)), out, () if read_out else earlier.left()

    def kept_in_main_memory(self, pass_index: int) -> AbstractContextManager[Any]:
        """Where what is saved for the backward of this pass moves, if it does."""
        if not self.offloaded(pass_index):
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=self.groups.device.type == "cuda")

    def _into_core(self, p: Pass, x: Tensor, hook: Hook) -> Tensor:
        with self._gradients(p, begins=True):
            x = hook(x)
        return x if p.grad else x.detach()

    # --- head ---------------------------------------------------------------------------------------------------------
    def local_logits(self, hidden_sbh: Tensor) -> Tensor:
        """FP32 logits of this rank's vocabulary rows [n, b, V_padded/tp]; padding rows are -inf."""
        logits, _ = self.output_layer(hidden_sbh, weight=self.head_weight() if self.tied else None)
        return loss.masked(logits.float(), self.vocab_size - self.groups.tp_rank * logits.shape[-1])

    def cross_entropy(self, hidden_sbh: Tensor, labels_nb: Tensor) -> Tensor:
        """Cross entropy of every row, FP32 [n, b]."""
        logits, _ = self.output_layer(hidden_sbh, weight=self.head_weight() if self.tied else None)
        valid = self.vocab_size - self.groups.tp_rank * logits.shape[-1]
        found, self.log_normaliser = loss.cross_entropy(logits, labels_nb, valid, self.groups.tp, self.z_loss)
        if self.selection is not None and self.selection.options.by == "entropy":
            self.entropy = loss.entropy(logits.detach(), self.log_normaliser, valid, self.groups.tp)
        return found

    def token_losses(self, hidden_sbh: Tensor, batch: MicroBatch) -> Tensor:
        """Cross entropy of every token, FP32 [n, b]."""
        return self.cross_entropy(hidden_sbh, batch.labels_bn.t().contiguous())

    def _selected(self, scores_nb: Tensor, losses_nb: Tensor, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights of the tokens' losses [n, b], and sums to report."""
        assert self.selection is not None
        mask_nb = batch.loss_mask_bn.t()
        if batch.weights_bn is None:
            found = self.selection.weigh(scores_nb, mask_nb)
        else:
            found = selection.Weighed(batch.weights_bn.t(), None)
        return found.weights_nb, selection.sums(found, losses_nb, mask_nb)

    def forward(
        self,
        p: Pass,
        batch: MicroBatch,
        incoming: Flow | None,
        state: PassState,
        step: Tensor | None,
        tokens: Tensor,
    ) -> Flow | Objective:
        """`run_pass`; after the last pass, the loss, whose one denominator is `tokens` of the global batch.

        A training step's forward without gradient gives the scores of its tokens instead.
        """
        watched = step is None and is_watched(p, self.method)
        out = self.run_pass(p, batch, incoming, state, step, watched)
        if isinstance(out, Flow):
            return out
        tools = StageExitTools(self, batch, step)
        losses_nb = self.token_losses(out.hidden, batch) if out.losses is None else tools.unsharded(out.losses)
        weights_nb = tools.full_mask_nb
        sums: dict[str, Tensor] = {}
        if step is not None and self.selection is not None:
            scores = self.selection.score(losses_nb, self.entropy)
            if not torch.is_grad_enabled():
                return Objective(losses_nb.new_zeros(()), {}, scores_nb=scores)
            weights_nb, sums = self._selected(scores, losses_nb, batch)
        found = objective(out, losses_nb, tools, tokens, weights_nb)
        found.sums |= {name: value / tokens for name, value in sums.items()}
        if step is not None and self.z_loss:
            assert self.log_normaliser is not None
            found.sums[Z_LOSS] = self.z_loss * (self.log_normaliser.square() * weights_nb).sum() / tokens
        for name, losses_nb in state.exit.items():
            if name.startswith(LOSS_OF_PASS):
                found.sums[name] = (losses_nb * tools.full_mask_nb).sum() / tokens
        return found
