"""Rules on number formats and kernels."""

from __future__ import annotations

from megaponder.config.gpus import DEFAULT_GPU, GPUS
from megaponder.config.rules.case import Case, Machine, Rule, nearest_multiple, require

CAPABILITY = {"delayed": (8, 9), "current": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""Oldest compute capability that each recipe runs on."""
_ARCHITECTURES = {(8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


def fp8_alignment(recipe: str) -> int:
    """Both sides of a GEMM in this recipe are multiples of this: blocks of MXFP8 have 32 elements."""
    return 32 if recipe == "mxfp8" else 16


def graphs_exclude_overlap(c: Case) -> None:
    """A captured pass runs no hooks, and overlapped communication is started by hooks."""
    par = c.cfg.parallel
    overlap = par.overlap_grad_reduce or par.overlap_param_gather
    rule = "a captured pass cannot start the communication of parallel.overlap_grad_reduce or overlap_param_gather"
    require(c.cfg.precision.cuda_graphs is not True or not overlap, "precision.cuda_graphs", True, rule, "use auto")


def graphs_exclude_context(c: Case) -> None:
    """Collectives inside of attention have not been captured with a pass."""
    rule = f"passes of parallel.context = {c.cfg.parallel.context} ranks are not captured"
    ok = c.cfg.precision.cuda_graphs is not True or c.cfg.parallel.context == 1
    require(ok, "precision.cuda_graphs", True, rule, "use auto, or parallel.context: 1")


def fused_gradients_are_aligned(c: Case) -> None:
    """cuBLAS adds to aligned buffers only, and only the distributed optimizer's are."""
    rule = "it needs parallel.distributed_optimizer, and not Muon: other gradient buffers are not aligned"
    ok = c.cfg.precision.grad_accum_fusion is not True or c.cfg.cuts_buffers
    require(ok, "precision.grad_accum_fusion", True, rule, "use auto")


def fp8_edges_leave_layers(c: Case) -> None:
    """Some layer must be left for FP8."""
    p, layers = c.cfg.precision, c.cfg.model.num_layers
    assert layers
    if p.fp8 != "none":
        rule = f"none of the {layers} layers would be left for fp8"
        fix = f"the nearest is {(layers - 1) // 2}"
        require(2 * p.fp8_bf16_layers < layers, "precision.fp8_bf16_layers", p.fp8_bf16_layers, rule, fix)


def fp8_needs_bf16(c: Case) -> None:
    """FP8 GEMMs of Transformer Engine sit between BF16 activations."""
    p = c.cfg.precision
    if p.fp8 == "none":
        return
    require(
        p.dtype == "bf16",
        "precision.fp8",
        p.fp8,
        "it needs precision.dtype = bf16",
        "use none, or precision.dtype: bf16",
    )
    rule = "it needs Transformer Engine's layers, not precision.implementation = local"
    require(p.implementation != "local", "precision.fp8", p.fp8, rule, "use none, or precision.implementation: te")


def fp8_sizes_are_aligned(c: Case) -> None:
    """Every matrix that a rank multiplies has sides that are multiples of `fp8_alignment`."""
    m, tp, each = c.cfg.model, c.cfg.parallel.tensor, fp8_alignment(c.cfg.precision.fp8)
    if c.cfg.precision.fp8 == "none":
        return
    assert m.hidden_size and m.ffn_size
    unit = each * tp
    for name, size in (("hidden_size", m.hidden_size), ("ffn_size", m.ffn_size)):
        rule = f"for fp8 it must be a multiple of {each} on each of parallel.tensor = {tp} ranks"
        require(size % unit == 0, f"model.{name}", size, rule, f"the nearest is {nearest_multiple(size, unit)}")
    rule = f"for fp8 all {m.num_heads} heads together must be a multiple of {unit} wide"
    require(m.query_width % unit == 0, "model.head_size", m.head_size, rule, f"for example {unit}")
    length, batch = c.cfg.data.sequence_length, c.cfg.train.micro_batch
    share = c.cfg.parallel.context * (tp if c.cfg.parallel.sequence else 1)
    rule = f"for fp8 the {length} x {batch} rows of a micro-batch must be a multiple of {each * share}"
    fix = f"the nearest is {nearest_multiple(length, each * share)}"
    require(length * batch % (each * share) == 0, "data.sequence_length", length, rule, fix)


def _gpu_runs(recipe: str, here: Machine) -> None:
    """The GPU is new enough for the recipe; the nearest is the newest that it runs, and a plan can take another GPU."""
    has = here.capability or (0, 0)
    needs = CAPABILITY[recipe]
    runs = [name for name, capability in CAPABILITY.items() if capability <= has]
    fix = f"the nearest is {runs[-1]}" if runs else "use none"
    gpu = "the GPU"
    if here.gpu is not None:
        gpu = f"{here.gpu}, for which this plan is{' by default' * (here.gpu == DEFAULT_GPU)},"
        newer = next((name for name, one in GPUS.items() if needs <= one.capability < (12, 0)), None)
        fix += f", or another GPU: --gpu {newer}" if newer else ""
    found = f"and {gpu} has {has[0]}.{has[1]}"
    rule = f"{recipe} needs compute capability {needs[0]}.{needs[1]} ({_ARCHITECTURES[needs]}) or newer, {found}"
    require(has >= needs, "precision.fp8", recipe, rule, fix)
    rule = f"Transformer Engine has no kernels of it from compute capability 12.0 on, {found}"
    require(recipe != "mxfp8" or has < (12, 0), "precision.fp8", recipe, rule, "the nearest is current")


def machine_has_the_kernels(c: Case) -> None:
    """Explicitly requested implementations must be available; `auto` uses what is available."""
    p, here = c.cfg.precision, c.machine
    if here is None:
        return
    te = here.device == "cuda" and here.transformer_engine
    rule = "Transformer Engine or a GPU is missing here"
    require(te or p.implementation != "te", "precision.implementation", p.implementation, rule, "use auto or local")
    if p.fp8 != "none":
        require(te, "precision.fp8", p.fp8, rule, "use none, or install megaponder[gpu] on a machine with a GPU")
        _gpu_runs(p.fp8, here)
    rule = "a GPU is missing here"
    require(
        p.cuda_graphs is not True or here.device == "cuda", "precision.cuda_graphs", True, rule, "use auto or false"
    )
    rule = "Transformer Engine and NVIDIA apex's kernel fused_weight_gradient_mlp_cuda are missing here"
    te = te and p.implementation != "local"
    ok = p.grad_accum_fusion is not True or te or here.grad_accum_kernel
    require(ok, "precision.grad_accum_fusion", True, rule, "use auto or false")


RULES: tuple[Rule, ...] = (
    graphs_exclude_overlap,
    graphs_exclude_context,
    fused_gradients_are_aligned,
    fp8_edges_leave_layers,
    fp8_needs_bf16,
    machine_has_the_kernels,
    fp8_sizes_are_aligned,
)
