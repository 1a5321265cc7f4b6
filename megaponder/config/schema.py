"""The configuration tree: one dataclass a section.

A field declares its default, its range and whether it may change when a run goes on (`megaponder.config.declare`); the
docstring under it becomes the command line's help.

Nothing here imports torch.  A field that is `None` is filled from the model preset, the method or another field by
`megaponder.config.resolve`; after that no field that the run uses is `None`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from megaponder.config.declare import declare
from megaponder.config.model import ModelConfig as ModelConfig

Offload = Literal["none", "optimizer", "weights"]


@dataclass
class PonderConfig:
    """The pondering method and its options."""

    method: str = declare("vanilla", resume="refused", load="free")
    """Name of the method; `megaponder plan --methods` lists them with their options."""
    options: dict[str, Any] = declare({}, resume="warned")
    """Options of the method, for example {steps: 3, topk: 0}; unknown ones are refused."""
    skip_halted: bool = False
    """Skip halted tokens in the computation instead of masking them: the same numbers, less work."""
    plugin: str | None = None
    """Python file or folder with your own method; its code is run."""


@dataclass
class DataConfig:
    """Indexed datasets and how they are mixed."""

    train: list[str | float] = declare([], resume="warned")
    """Blend for training: `path` or `weight path ...` (without .bin/.idx).  Weights count sequences; 0: not read."""
    valid: list[str | float] | dict[str, list[str | float]] = declare([], resume="warned")
    """Blend for validation, or several by name, {wiki: [data/wiki], code: [data/code]}, each with a loss of its own;
    empty: the held-out part of `train` given by `split`."""
    split: str = declare("969,30,1", resume="warned")
    """Parts of each dataset's documents for training, validation and test; used when `valid` is empty."""
    sequence_length: int = declare(2048, ge=1, unit="tokens", resume="warned", aliases=("seq_length", "seq_len"))
    """Tokens in a sample."""
    loss_mask: Literal["plain", "ignore_eod_target", "megatron_eod", "answers"] = declare(
        "ignore_eod_target", resume="warned"
    )
    """Targets in the loss: all; all except EOD (the papers' rule); all except those whose input is EOD (Megatron's
    rule); the assistant's in conversations, each of which attends to itself alone (docs/sft.md)."""
    document_attention: bool = declare(
        False, resume="warned", aliases=("reset_attention_mask", "reset_position_ids", "document_mask")
    )
    """A token attends to its own document only, whose positions begin at 0; false: to all before it in its sample."""
    document_tokens: float | None = declare(None, ge=1, unit="tokens", compared=False)
    """With document_attention, for counts of FLOPs: the length of a token's document within its sample, mean over
    tokens; default: that of the datasets of train, and where they are not there the whole sample."""
    eod_id: int | None = declare(None, resume="warned")
    """End-of-document id; taken from the dataset's JSON when absent."""
    tokenizer: str | None = declare(None, compared=False)
    """Folder or file of the tokenizer (copied into exports); must match the dataset's fingerprint."""
    cache: str | None = declare(None, compared=False)
    """Folder for index caches, shared by ranks and jobs; default: <run>/cache."""
    shuffle_seed: int | None = declare(None, ge=0, resume="warned")
    """Seed of the sample order; default: train.seed."""
    accept_changed: list[str] = declare([])
    """Datasets of the blends that may differ from those of the same name that the checkpoint was trained on."""
    accept_zeros: list[str] = declare([])
    """Datasets of the blends in which long runs of token id 0 are intended, not regions that were never written."""

    def valid_blends(self) -> dict[str, list[str | float]]:
        """The blends for validation by name; one without names has the name ""; none where `valid` is empty."""
        if isinstance(self.valid, dict):
            return self.valid
        return {"": self.valid} if self.valid else {}

    @staticmethod
    def valid_field(name: str) -> str:
        """The field of one of `valid_blends`."""
        return f"data.valid.{name}" if name else "data.valid"


@dataclass
class ParallelConfig:
    """The layout.  Data parallel size is world size / (tensor x context x pipeline)."""

    tensor: int = declare(1, ge=1, aliases=("tp",))
    """Tensor-parallel size (TP)."""
    pipeline: int = declare(1, ge=1, aliases=("pp",))
    """Pipeline-parallel size (PP); passes become virtual stages."""
    context: int = declare(1, ge=1, aliases=("cp", "context_parallel_size"))
    """Context-parallel size (CP): ranks that share each sequence, of which every one holds an equal part."""
    experts: int = declare(1, ge=1, aliases=("ep", "expert_model_parallel_size"))
    """Expert-parallel size (EP), with model.moe: ranks that share a layer's experts, of which every one holds an equal
    number; they are ranks that hold other tokens."""
    expert_tensor: int | None = declare(None, ge=1, aliases=("etp", "expert_tensor_parallel_size"))
    """Ranks over which each expert is split; default: those of parallel.tensor."""
    stage_layers: list[int] | None = declare(None, ge=1)
    """Layers of each pipeline stage, for stages with different work; default: equal parts."""
    sequence: bool = declare(False, aliases=("sp",))
    """Sequence parallelism (SP): norms and residuals sharded over the tensor group."""
    distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks; with optimizer.kind: muon each of them has whole matrices."""
    zero_stage: int | None = declare(None, ge=0, le=3, aliases=("zero", "zero_optimization"))
    """With train.engine: deepspeed, what is sharded over data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients
    too, 3 weights too; default: 2."""
    offload: Offload = declare("none", aliases=("cpu_offload",))
    """With train.engine: deepspeed, what is kept in main memory: optimizer state, which is updated there (needs
    zero_stage of at least 1), or with zero_stage: 3 the weights as well."""
    overlap_grad_reduce: bool = False
    """Start gradient reduction during backward; passes are then not captured as CUDA graphs."""
    overlap_param_gather: bool = False
    """Gather parameters during the next forward (needs distributed_optimizer); DeepSpeed does so with zero_stage: 3 and
    not otherwise, and Muon's matrices are sent at the end of a step."""
    microbatch_group: int | None = declare(None, ge=1)
    """Micro-batches that run through one pass before the next pass starts (N of the interleaved schedule)."""
    recompute: Literal["none", "layer"] = "none"
    """Activation recompute: keep everything, or only the input of each layer."""
    recompute_layers: int | None = declare(None, ge=1)
    """With recompute: layer, only this many first layers of each pipeline stage; default: all."""
    recompute_passes: int | None = declare(None, ge=1)
    """With recompute: layer, only this many first passes, whose activations are kept longest; default: all."""
    offload_passes: int = declare(0, ge=0)
    """With recompute: layer, the inputs that recomputed layers keep of this many first passes lie in main memory until
    the backward; 0: none.  Passes are then not captured as CUDA graphs."""
    deallocate_pipeline_outputs: bool | None = None
    """Free a stage's output once sent; default: on with NCCL, off with gloo (where it corrupts numbers)."""
    timeout_minutes: float = declare(10.0, gt=0, le=10**6, unit="minutes")
    """Time after which a collective that has not completed ends the run."""

    @property
    def expert_ranks(self) -> int:
        """Ranks over which each expert is split."""
        return self.expert_tensor or self.tensor

    @property
    def replica(self) -> int:
        """Ranks that hold the model once and run the same sequences."""
        return self.tensor * self.context * self.pipeline


@dataclass
class PrecisionConfig:
    """Number formats and kernels."""

    dtype: Literal["fp32", "bf16"] = declare("fp32", resume="warned", aliases=("bf16",))
    """Format of parameters and activations; bf16 keeps FP32 master weights, gradients and optimizer state."""
    fp8: Literal["none", "delayed", "current", "blockwise", "mxfp8", "nvfp4"] = declare("none", resume="warned")
    """FP8 or FP4 recipe of the linear layers (Transformer Engine; compute capability 8.9 or newer, for blockwise 9.0,
    for mxfp8 and nvfp4, which nobody has run here, 10.0)."""
    implementation: Literal["auto", "local", "te"] = "auto"
    """Layers: PyTorch (local), Transformer Engine (te), or te if it is installed and a GPU is present (auto)."""
    fp8_bf16_layers: int = declare(0, ge=0, unit="layers")
    """First and last layers of the model that stay in BF16."""
    fp8_canary: float = declare(0.1, ge=0)
    """Bound on the relative difference of the loss in the start-up comparison with BF16; 0 skips it."""
    grad_accum_fusion: bool | Literal["auto"] = declare("auto", compared=False)
    """GEMMs add weight gradients to the FP32 buffers; auto: if Transformer Engine or NVIDIA apex's kernel exists."""
    cuda_graphs: bool | Literal["auto"] = declare("auto", compared=False)
    """Capture passes as CUDA graphs; auto: on a GPU if they fit, without overlapped reduction or gathering."""


@dataclass
class OptimizerConfig:
    """AdamW, or Muon with AdamW; docs/optimizers.md."""

    kind: Literal["adamw", "muon"] = declare("adamw", resume="refused", load="free", aliases=("optimizer", "name"))
    """Muon: for the matrices of the layers; embeddings, head, norms, biases and the method's parameters keep AdamW."""
    lr: float = declare(3e-4, gt=0, le=1, resume="warned", aliases=("learning_rate", "max_lr"))
    """Peak learning rate."""
    tuned_width: int | None = declare(None, ge=1, resume="warned", aliases=("mup_base_hidden_size", "base_width"))
    """Hidden size at which lr and model.init_std were tuned: rates and initial weights are scaled to this model's (muP;
    docs/optimizers.md); default: they are used as they are."""
    tuned_passes: float | None = declare(None, ge=1, resume="warned")
    """Passes with which lr was tuned: that of the layers' matrices is divided by the root of this run's passes over
    them; default: it is used as it is."""
    beta1: float = declare(0.9, ge=0, lt=1, resume="warned")
    """Decay of the first moment."""
    beta2: float = declare(0.95, ge=0, lt=1, resume="warned")
    """Decay of the second moment."""
    momentum: float = declare(0.95, ge=0, lt=1, resume="warned")
    """Decay of Muon's momentum."""
    eps: float = declare(1e-8, gt=0, lt=1, resume="warned")
    """Added to the root of the second moment."""
    weight_decay: float = declare(0.1, ge=0, lt=1, resume="warned", aliases=("wd",))
    """Decoupled decay of matrices and embeddings; biases and norms are never decayed."""
    clip_grad: float = declare(1.0, ge=0, resume="warned")
    """Largest global gradient norm; 0 disables clipping."""
    ema_decay: float = declare(0.0, ge=0, lt=1, resume="warned", aliases=("ema",))
    """Decay of a moving average of the weights, kept in FP32 and in checkpoints (eval and export --ema); 0: none."""


@dataclass
class ScheduleConfig:
    """Learning rate over training."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = declare("cosine", resume="warned")
    """Shape after warm-up; wsd stays constant and decays linearly over the last decay_fraction."""
    warmup_fraction: float = declare(0.01, ge=0, lt=1, resume="warned", aliases=("warmup", "warmup_steps"))
    """Fraction of the budget spent on linear warm-up."""
    min_lr_fraction: float = declare(0.1, ge=0, le=1, resume="warned", aliases=("min_lr",))
    """Floor as a fraction of the peak."""
    decay_fraction: float = declare(0.1, ge=0, le=1, resume="warned")
    """Length of wsd's final decay, as a fraction of the budget."""


@dataclass
class TrainConfig:
    """Engine, budget, batch and evaluation."""

    engine: Literal["megatron", "deepspeed"] = declare("megatron", compared=False)
    """What runs forward, backward and optimizer: megatron-core, or DeepSpeed (extra megaponder[deepspeed]), which
    shards gradients and weights too, but has data parallelism alone; docs/deepspeed.md."""
    steps: int | None = declare(None, ge=1, resume="warned", aliases=("max_steps", "train_iters"))
    """Optimizer steps; set this, tokens or epochs."""
    tokens: int | None = declare(None, ge=1, le=10**15, resume="warned")
    """Token budget; rounded up to full steps."""
    epochs: int | None = declare(None, ge=1, le=10**6, resume="warned", aliases=("num_train_epochs", "num_epochs"))
    """Budget in passes over data.train, with weights over its conversations alone; rounded up to full steps."""
    global_batch: int = declare(
        256, ge=1, unit="sequences", resume="warned", aliases=("batch_size", "global_batch_size", "gbs")
    )
    """Sequences per optimizer step over all ranks."""
    micro_batch: int = declare(1, ge=1, unit="sequences", aliases=("micro_batch_size", "mbs"))
    """Sequences that one rank runs at a time."""
    batch_rampup: list[int] | None = declare(None, resume="warned")
    """[start, increment, sequences]: start with `start` sequences per step, reach global_batch after `sequences`."""
    eval_every: int = declare(1000, ge=0, unit="steps", compared=False)
    """Steps between evaluations; 0: only at the end."""
    eval_batches: int = declare(10, ge=0, unit="batches")
    """Global batches in an evaluation; 0 disables evaluation."""
    eval_depths_every: int = declare(0, ge=0, unit="steps", compared=False)
    """Steps between evaluations that also measure the loss with all tokens stopping after each pass; 0: never."""
    tasks: list[str] = declare([], compared=False)
    """Tasks of lm-eval (extra megaponder[eval]) to run on the model while it trains; empty: none."""
    tasks_every: int = declare(0, ge=0, unit="steps", compared=False)
    """Steps between runs of the tasks, each after a checkpoint; 0: only at the end."""
    tasks_folder: str | None = declare(None, compared=False)
    """Folder with task definitions of your own (YAML files of lm-eval)."""
    tasks_limit: int = declare(0, ge=0, unit="examples", compared=False)
    """Examples of each task that are used; 0: all."""
    method_only_steps: int = declare(0, ge=0, unit="steps")
    """Number of first steps in which only the method's own parameters (gates, routers) are trained."""
    method_lr: float | None = declare(None, gt=0, le=1, resume="warned")
    """Learning rate in these first steps; default: the schedule's."""
    only: list[str] = declare([], resume="refused", load="free", aliases=("freeze", "trainable"))
    """Groups of parameters that are trained, all others stay as they are: attention, norms, mlp (experts among them),
    experts, shared_expert, routers, embeddings, method; empty: all are trained."""
    disciplines: dict[str, Any] = declare({}, resume="warned")
    """Teach the routers of an upcycled mixture the discipline of each sequence, by its dataset, such as {weight: 0.01,
    data: {math: [data/math], law: [data/law]}}, in the order of `megaponder upcycle`; {}: no labels."""
    z_loss: float = declare(0.0, ge=0, le=1, resume="warned", aliases=("z_loss_weight", "z_loss_coeff"))
    """Weight of a loss on the squared log of the softmax's normaliser, which keeps logits small; PaLM: 1e-4; 0: off."""
    eslm: dict[str, Any] = declare({}, resume="warned")
    """Train on the tokens with the highest scores alone, such as {by: loss, alpha: 0.1}; {}: on all; docs/eslm.md."""
    seed: int = declare(1234, ge=0, resume="warned")
    """Seed of initialisation, data order and the method's random plan."""
    deterministic: bool = declare(False, compared=False)
    """Use PyTorch's deterministic kernels."""


@dataclass
class CheckpointConfig:
    """Saving and resuming."""

    every: int = declare(1000, ge=0, unit="steps", aliases=("save_interval",))
    """Steps between checkpoints; 0: only at the end."""
    keep_last: int = declare(3, ge=1, unit="checkpoints")
    """Number of newest checkpoints to keep."""
    keep_every: int = declare(0, ge=0, unit="steps")
    """Checkpoints whose step is a multiple of this are kept forever; 0: none."""
    asynchronous: bool = False
    """Write in the background while training continues."""
    local: str | None = None
    """Folder on a disk of each node for local checkpoints, which a restart of the same job on the same nodes reads;
    docs/faults.md."""
    local_every: int = declare(0, ge=0, unit="steps")
    """Steps between local checkpoints, of which each rank keeps two; 0: none."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Continue from the newest complete checkpoint of the run folder: if there is one, never, or fail without one."""
    load: str | None = None
    """Checkpoint folder to start from (weights only) when the run folder has none."""
    load_changes: list[str] = declare([])
    """Fields of the model that may differ from those of `load`: to train on for longer texts, model.rotary_base,
    model.rotary_scaling and model.freqkv; and model.depth_attention."""


@dataclass
class FaultsConfig:
    """What happens on bad losses or gradients and on failures of ranks; see docs/faults.md."""

    not_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient norm that is NaN or infinite: stop the run, or skip the step's update."""
    spike: Literal["ignore", "skip"] = "ignore"
    """A loss or gradient norm far above recent ones: take the step, or skip its update."""
    spike_window: int = declare(128, ge=4, unit="steps")
    """Number of recent steps whose mean and standard deviation define a spike; at least half of them must be known."""
    spike_sd: float = declare(6.0, gt=0, unit="standard deviations")
    """Standard deviations above the mean at which a value is a spike."""
    rollback_after: int = declare(0, ge=0, unit="steps")
    """Skipped steps in a row after which the run goes back to its last checkpoint; 0: never."""
    max_rollbacks: int = declare(2, ge=1)
    """Times that a run goes back to the same checkpoint before it stops."""
    skip_data: bool = False
    """After a rollback, skip the sequences of the skipped steps."""
    max_without_targets: int = declare(8, ge=0)
    """Allowed consecutive steps, or evaluations, in which no target counts; one more stops the run."""
    hang_minutes: float | None = declare(None, gt=0, unit="minutes")
    """Time without progress after which the stalled rank is named; default: half of parallel.timeout_minutes."""
    in_process_restarts: int = declare(0, ge=0)
    """Restarts within the processes after an error on one of several ranks, from the newest checkpoint (extra
    megaponder[resilience]); docs/faults.md."""
    straggler_ratio: float = declare(1.25, ge=1)
    """A node whose steps take this many times the median of all nodes is reported."""


@dataclass
class LoggingConfig:
    """What is written while training."""

    every: int = declare(10, ge=1, unit="steps", aliases=("log_interval",))
    """Steps between console lines and metric rows."""
    tensorboard: bool = True
    """Write TensorBoard events to <run>/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases mode."""
    wandb_project: str = "megaponder"
    """Weights & Biases project."""
    peak_tflops: float | None = declare(None, gt=0, unit="TFLOP/s")
    """Peak TFLOP/s of one device for MFU; default: known GPUs by name, otherwise MFU is not shown."""
    profile_steps: list[int] = declare([])
    """First and last step to profile, counted from this start (1: its first step); empty: none.  --profile: [4, 5]."""
    profile_ranks: list[int] = declare([0])
    """Ranks to profile."""
    prometheus_port: int = declare(0, ge=0, le=65535)
    """Port of /metrics and /health, served by the first process of each node; 0: no endpoint."""
    prometheus_host: str = "127.0.0.1"
    """Address that the endpoint binds to; 0.0.0.0 lets other machines scrape it."""


@dataclass
class RunConfig:
    """One run: everything that `megaponder train` needs."""

    run: str = declare("runs/default", compared=False)
    """Run folder: resolved config, checkpoints, metrics."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Backbone."""
    ponder: PonderConfig = field(default_factory=PonderConfig)
    """Pondering method."""
    data: DataConfig = field(default_factory=DataConfig)
    """Datasets."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning-rate schedule."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Budget and batch."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    """Faults."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Logging."""

    @property
    def cuts_buffers(self) -> bool:
        """Whether gradients lie in buffers that megatron-core cuts over data-parallel ranks at any place; Muon, which
        needs whole matrices, gives each rank some of them instead."""
        return self.parallel.distributed_optimizer and self.optimizer.kind != "muon"

    @property
    def gathers_ahead(self) -> bool:
        """Whether updated parameters arrive during the next forward."""
        return self.parallel.overlap_param_gather and self.cuts_buffers

    @property
    def zero(self) -> int | None:
        """ZeRO's stage with DeepSpeed; None with megatron-core."""
        if self.train.engine != "deepspeed":
            return None
        return 2 if self.parallel.zero_stage is None else self.parallel.zero_stage
