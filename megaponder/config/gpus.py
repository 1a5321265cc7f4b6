"""Known accelerators: dense peak throughput, memory and compute capability.  Vendors' sparsity figures are halved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One device."""

    bf16_tflops: float
    fp8_tflops: float | None
    memory_gib: float
    """Approximately what the driver reports as total."""
    capability: tuple[int, int]
    """Compute capability, which determines which kernels a device has."""


GPUS: dict[str, Gpu] = {
    "h100-sxm": Gpu(989.4, 1978.9, 79.1, (9, 0)),
    "h100-pcie": Gpu(756.0, 1513.0, 79.1, (9, 0)),
    "h100-nvl": Gpu(835.0, 1671.0, 93.1, (9, 0)),
    "h200": Gpu(989.4, 1978.9, 139.8, (9, 0)),
    "gh200": Gpu(989.4, 1978.9, 94.5, (9, 0)),
    "a100-80gb": Gpu(312.0, None, 79.1, (8, 0)),
    "a100-40gb": Gpu(312.0, None, 39.4, (8, 0)),
    "b200": Gpu(2250.0, 4500.0, 178.0, (10, 0)),
    "l40s": Gpu(362.0, 733.0, 44.4, (8, 9)),
}
DEFAULT_GPU = "h100-sxm"

# substrings of the names that drivers report, most specific first
_NAMES: tuple[tuple[str, str], ...] = (
    ("GH200", "gh200"),
    ("H200", "h200"),
    ("H100 PCIe", "h100-pcie"),
    ("H100 NVL", "h100-nvl"),
    ("H100", "h100-sxm"),
    ("A100-SXM4-40GB", "a100-40gb"),
    ("A100-PCIE-40GB", "a100-40gb"),
    ("A100", "a100-80gb"),
    ("B200", "b200"),
    ("L40S", "l40s"),
)


def find_gpu(device_name: str) -> Gpu | None:
    """The entry for a name as given by torch.cuda.get_device_name; None for an unknown device."""
    return next((GPUS[key] for part, key in _NAMES if part in device_name), None)
