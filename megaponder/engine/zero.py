"""The engine on DeepSpeed: ZeRO shards optimizer state (stage 1), gradients (2) and weights (3) over ranks.

DeepSpeed is given one module that runs all passes of a micro-batch, so that each has one forward and one backward,
however many passes there are and however their number changes.  With stage 3 it gathers a module's weights right before
the module runs, and finds by itself the tables and gates that are read without a call of their module.

`ZeroOptimizer` has the part of megatron-core's optimizer interface that the training loop uses.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from megaponder.config.schema import RunConfig
from megaponder.config.zero import BUCKET, LIVE
from megaponder.engine.chunks import PassChunk, Runner, Step
from megaponder.engine.groups import Groups
from megaponder.engine.model import PonderStage
from megaponder.engine.stash import Stash
from megaponder.engine.step import Engine, StepOutput
from megaponder.engine.transfer import transfer
from megaponder.ponder.base import Pass

MOMENTS = ("exp_avg", "exp_avg_sq")


def library() -> Any:
    """DeepSpeed, imported late and quietly: with megatron-core alone nobody needs it."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it says so where there is no GPU
    import deepspeed

    logging.disable(before)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # a kernel in gloo's place, which takes minutes to compile
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def settings(cfg: RunConfig) -> dict[str, Any]:
    """DeepSpeed's configuration of a run."""
    par, hidden, pinned = cfg.parallel, cfg.model.hidden_size or 0, torch.cuda.is_available()
    zero: dict[str, Any] = {
        "stage": cfg.zero,
        "overlap_comm": par.overlap_grad_reduce,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    }
    if cfg.zero == 3:
        # norms, biases and gates stay whole; what comes next is gathered while a layer runs
        zero |= {
            "stage3_param_persistence_threshold": 10 * hidden,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": LIVE,
            "stage3_max_reuse_distance": LIVE,
        }
    if par.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if par.offload == "weights":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    return {
        # micro-batches are counted here, and losses divided by the targets of the global batch
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": cfg.optimizer.clip_grad,
        "bf16": {"enabled": cfg.precision.dtype == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,  # PyTorch's, which has a fused kernel for GPUs and for CPUs
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


class Passes(nn.Module):
    """All passes of a micro-batch, as DeepSpeed calls them.

    The stage's parts are its children, and the stage is not: what the stage reads directly then counts as read by this
    module, whose output is a tensor, so that DeepSpeed's hooks see the begin of its backward.
    """

    def __init__(self, stage: PonderStage):
        super().__init__()
        assert not list(stage.parameters(recurse=False))
        for name, child in stage.named_children():
            self.add_module(name, child)

    def forward(self, chunk: PassChunk) -> Tensor:
        return chunk.forward()


class Adam(torch.optim.AdamW):
    """AdamW that can be told to leave everything as it is."""

    idle = False

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return None if self.idle else super().step(closure)


def parameter_groups(stage: nn.Module, rates: dict[nn.Parameter, float]) -> list[dict[str, Any]]:
    """Those that are decayed, by their factor on the learning rate, and biases, norms and other vectors."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in stage.named_parameters():
        if p.requires_grad:
            decayed = p.dim() > 1 and not name.endswith(".bias")
            groups.setdefault((rates[p], 1 / rates[p] if decayed else 0.0), []).append(p)
    return [{"params": own, "lr_mult": rate, "wd_mult": decay} for (rate, decay), own in groups.items()]


class ZeroOptimizer:
    """DeepSpeed's optimizer under the names of megatron-core's; whole tensors of its state are read and set one
    parameter at a time."""

    chained_optimizers: tuple[Any, ...] = ()
    """DeepSpeed clips by itself."""

    def __init__(self, engine: Any, adam: Adam, groups: Groups):
        self.engine, self.adam, self.groups = engine, adam, groups
        self.sharded = isinstance(adam, Adam) and engine.optimizer is not adam
        self.entries: list[Any] = []
        """What checkpoints have of the model (`checkpoint.zero_state`)."""
        for p in self._held():
            state = {name: torch.zeros_like(p, dtype=torch.float32) for name in MOMENTS}
            adam.state[p] = {"step": torch.zeros((), device=p.device)} | state
        if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        self._waits = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.adam.param_groups

    def _held(self) -> list[Tensor]:
        """What Adam updates on this rank: FP32 shards, or without ZeRO the parameters."""
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            if hasattr(self.engine.optimizer, name):
                return list(getattr(self.engine.optimizer, name))
        return [p for group in self.adam.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        """Drop gradients that no update has used."""
        if self._waits:
            self.adam.idle = True
            self._step()
            self.adam.idle = False
            if hasattr(self.engine.optimizer, "all_grad_tensors"):
                # stages 1 and 2 keep sums that are not finite where the optimizer is offloaded in BF16, for ever
                sums = self.engine.optimizer.averaged_gradients
                sums.update(dict.fromkeys(sums))

    def prepare_grads(self) -> bool:
        self._waits = True
        return False

    def get_grad_norm(self) -> float:
        """Global norm of the reduced gradients before clipping; infinite where one of them is not finite."""
        optimizer = self.engine.optimizer
        if not self.sharded:
            return float(nn.utils.get_total_norm([p.grad for p in self._held() if p.grad is not None]))
        if hasattr(optimizer, "scaled_global_norm"):
            return float(optimizer.scaled_global_norm())
        if hasattr(optimizer, "get_grads_for_norm"):  # those of BF16's stage 1, which are whole
            return float(nn.utils.get_total_norm(optimizer.get_grads_for_norm()[0]))
        device = self.groups.device
        parts = [g for of_group in optimizer.get_fp32_grad_partitions().values() for g in of_group.values()]
        squares = [g.float().square().sum(dtype=torch.float64).to(device) for g in parts]
        total = torch.stack([*squares, torch.zeros((), dtype=torch.float64, device=device)]).sum()
        dist.all_reduce(total, group=self.groups.dp)
        return math.sqrt(total) if total.isfinite() else math.inf

    def step_with_ready_grads(self) -> bool:
        self._step()
        return True

    def _step(self) -> None:
        self.engine.step()
        self._waits = False

    def gathered(self, parameters: Sequence[nn.Parameter], changes: bool = False) -> AbstractContextManager[Any]:
        """Parameters are whole inside; with `changes`, those that the first rank makes to them stay."""
        mine = [p for p in parameters if hasattr(p, "ds_id")]
        if not mine:
            return nullcontext()
        gathered: AbstractContextManager[Any] = library().zero.GatheredParameters(mine, 0 if changes else None)
        return gathered

    def read(self, p: nn.Parameter, name: str = "") -> Tensor:
        """The whole FP32 weight, or the moment of this name.  All ranks call this."""
        if not self.sharded:
            return self.adam.state[p][name] if name else p.detach()
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        found = safe_get_full_optimizer_state(p, name) if name else safe_get_full_fp32_param(p)
        assert isinstance(found, Tensor)
        return found

    @torch.no_grad()
    def write(self, p: nn.Parameter, value: Tensor, name: str = "") -> None:
        """Set the whole weight, in FP32 and as the model has it, or the moment of this name.  All ranks call this."""
        value = value.to(self.groups.device)
        if not name:
            with self.gathered([p], changes=True):
                p.data.copy_(value)
        if not self.sharded:
            if name:
                self.adam.state[p][name].copy_(value)
            return
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if name:
            safe_set_full_optimizer_state(p, value.float(), name)
        elif p.requires_grad:
            safe_set_full_fp32_param(p, value.float())

    def set_count(self, updates: int) -> None:
        """Adam's step count."""
        for p in self._held():
            self.adam.state[p]["step"].fill_(updates)


def release_after_every_pass(offload: Any) -> None:
    """Let ZeRO's third stage release a module's weights after each backward of the module.

    It counts the gradients that are still to come from the module's last call alone, so that the backward of earlier
    passes gathered weights that nothing released: towards the first pass the whole model.
    """
    fetch = offload.pre_sub_module_backward_function

    def fetched(module: Any) -> None:
        module.ds_grads_remaining = max(1, module.ds_grads_remaining)
        fetch(module)

    offload.pre_sub_module_backward_function = fetched


Updates = MegatronOptimizer | ZeroOptimizer
"""What an engine's weights are updated by."""


class ZeroEngine(Engine):
    """The stage inside of DeepSpeed's engine."""

    def __init__(self, cfg: RunConfig, stage: PonderStage, groups: Groups):
        super().__init__(stage, groups, cfg.train.seed, None, Runner(stage.forward, stage, None))
        stage.before_use = lambda module: None  # DeepSpeed's hooks belong to calls, and it sees the reading itself
        adam = Adam(
            parameter_groups(stage, transfer(cfg, stage.method).rates(stage)),
            lr=cfg.optimizer.lr,
            betas=(cfg.optimizer.beta1, cfg.optimizer.beta2),
            eps=cfg.optimizer.eps,
            weight_decay=cfg.optimizer.weight_decay,
            fused=True,
        )
        with redirect_stdout(io.StringIO()):  # it prints its memory
            self.engine, *_ = library().initialize(
                model=Passes(stage), optimizer=adam, config=settings(cfg), dist_init_required=False
            )
        if cfg.zero == 3:
            release_after_every_pass(self.engine.optimizer.parameter_offload)
        self.optimizer = ZeroOptimizer(self.engine, adam, groups)

    def zero_grad(self) -> None:
        """The optimizer's own does it."""

    def close(self) -> None:
        self.engine.destroy()
        if hasattr(self.engine.optimizer, "parameter_offload"):
            from deepspeed.runtime.zero import parameter_offload

            parameter_offload.FWD_MODULE_STACK.clear()  # it would keep the model

    def whole_parameters(self) -> AbstractContextManager[None]:
        return nullcontext()  # weights are read one by one

    def settle(self, out: StepOutput, step: int) -> None:
        with self.optimizer.gathered(list(self.stage.method_modules.parameters()), changes=True):
            super().settle(out, step)

    def _begin(self, passes: Sequence[Pass]) -> None:
        """DeepSpeed needs no plan."""

    def _schedule(self, run: Step, forward_only: bool) -> None:
        chunk, count = PassChunk(self._runner, self.stage.config, run, None, Stash()), len(run.batches)
        for i in range(count):
            if forward_only:
                self.engine(chunk=chunk)
                continue
            self.engine.set_gradient_accumulation_boundary(i == count - 1)
            loss = self.engine(chunk=chunk)
            # DeepSpeed takes the mean over ranks, and losses are parts of a sum
            self.engine.backward(loss * self.groups.dp_size, scale_wrt_gas=False)
        self.own_time.stop()
