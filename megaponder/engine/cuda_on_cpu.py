"""Runs megatron-core on machines without a GPU: the "cuda" that it uses everywhere is mapped to the CPU.

megatron-core writes `device="cuda"`, `torch.cuda.current_device()` and `torch.cuda.FloatTensor` into its
schedules, optimizers and communication.  `install()` redirects these few calls to their CPU counterparts; if a GPU is
present it only makes the import of megatron-core faster.  Call it before the first `import megatron.core`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from typing import Any

import torch
from torch.utils import _device

from megaponder.engine import megatron_versions

_installed = False

_FACTORIES = """
    arange as_tensor asarray empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like
    randint randint_like randn randn_like randperm scalar_tensor tensor tril_indices triu_indices zeros zeros_like
"""
_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros to"


def _redirect_devices() -> None:
    """Let PyTorch's functions that take a device, and no others, send what is meant for a GPU to the CPU.

    A TorchFunctionMode would need no list, but Python would handle every call then, even the reading of a shape: a
    quarter of a small model's step.
    """
    _device._device_constructors()  # `with torch.device(...)` knows them by identity: those inside ours, from now on
    builtins = torch.jit._builtins
    for owner, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
        for name in names.split():
            function = getattr(owner, name)
            redirected = _on_cpu(function)
            setattr(owner, name, redirected)
            if operator := builtins._find_builtin(function):
                builtins._register_builtin(redirected, operator)  # torch.jit.script knows functions by identity
    kind = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # megatron-core's optimizers sort parameters by the names of CUDA tensor types
        found = kind(self, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _on_cpu(function: Any) -> Any:
    """The function, with `device` and `pin_memory` as a machine without a GPU has them."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if isinstance(device, int) or (device is not None and str(device).startswith("cuda")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return call


class _Stream:
    """The CPU runs in program order: streams have nothing to wait for, events nothing to record."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> _Stream:
        return self

    wait = wait_stream = wait_event = record = record_event = synchronize = _nothing

    def query(self) -> bool:
        return True


class _Event(_Stream):
    pass


def install() -> bool:
    """Map "cuda" to the CPU if there is no GPU; returns whether the mapping is active.  Safe to call repeatedly."""
    global _installed
    if torch.cuda.is_available():
        _import_with(_compiled_later)
        return False
    if _installed:
        return True
    _installed = True
    # installed for GPUs but of no use here: megatron-core would call its CUDA kernels
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    if "torch._dynamo" in sys.modules:  # already imported elsewhere: megatron-core's kernels must not use it
        torch._dynamo.config.disable = True
    _import_with(_as_it_is)
    from megatron.core import jit

    jit.disable_jit_fuser()  # for modules of it that are imported later
    cpu = torch.device("cpu")
    replacements = {
        "current_device": lambda: cpu,
        "device_count": lambda: 1,
        "set_device": lambda *a, **k: None,
        "synchronize": lambda *a, **k: None,
        "empty_cache": lambda *a, **k: None,
        "current_stream": lambda *a, **k: _Stream(),
        "default_stream": lambda *a, **k: _Stream(),
        "stream": lambda s: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "Stream": _Stream,
        "Event": _Event,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    _redirect_devices()

    from megatron.core.tensor_parallel import random

    _share_groups()
    _exact_norms()
    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    # its tracker warns when "CUDA" draws move the CPU generator; here they are the same generator
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    return True


def _import_with(decorator: Any) -> None:
    """Import megatron-core with `decorator` in place of torch.compile, which it decorates small kernels with.

    The compiler alone is half of the import time, wherever it is applied, and on a CPU compiling takes longer than it
    saves.
    """
    if "megatron.core" in sys.modules:
        return
    megatron_versions.without_triton()
    megatron_versions.without_advice()
    compiler, torch.compile = torch.compile, decorator
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron-core lists the GPU libraries that it does not find
            from megatron.core import jit  # noqa: F401  its later modules take the decorator from here
    finally:
        torch.compile = compiler


def _compiled_later(function: Any = None, **options: Any) -> Any:
    """torch.compile, at the function's first call."""
    if function is None:
        return functools.partial(_compiled_later, **options)
    compiled: list[Any] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(torch.compile(function, **options))
        return compiled[0](*args, **kwargs)

    return call


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """A no-op torch.compile, as a decorator with or without options."""
    return function if function is not None else lambda f: f


def _exact_norms() -> None:
    """Gradient norms summed in FP64: torch.norm in FP32 was observed to be 1e-3 too small for tables of a few million
    elements."""
    from megatron.core.optimizer import clip_grads

    def l2_norm(chunk_size: Any, flag: Any, lists: Any, *args: Any) -> tuple[torch.Tensor, None]:
        square = sum(float(t.double().square().sum()) for tensors in lists for t in tensors)
        return torch.tensor([square**0.5], dtype=torch.float), None

    clip_grads.l2_norm_impl = l2_norm


def _share_groups() -> None:
    """Make megatron-core's process groups with the same ranks share one group.

    It creates about twenty groups, most of them with equal ranks, and every gloo group has three threads, one of which
    wakes a hundred times a second.  Calls on a shared group run in program order, which is the same on all ranks.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    create = parallel_state.create_group
    known: dict[tuple[Any, ...], Any] = {}
    world: list[Any] = [None]

    def shared(ranks: Any = None, timeout: Any = None, **kwargs: Any) -> Any:
        if world[0] is not dist.group.WORLD:  # torch.distributed was restarted
            known.clear()
            world[0] = dist.group.WORLD
        key = (tuple(ranks), timeout)
        if key not in known:
            known[key] = create(ranks, timeout=timeout, **kwargs)
        return known[key]

    parallel_state.create_group = shared
