"""GPUs known by name: their sizes, their nominal rates, and the rates that were measured on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One GPU as a compiler and a planner see it. Bytes, bytes a second, floating-point operations a second.

    Attributes:
        name: its name on the command line.
        device_kind: JAX's name for it.
        compute_capability: major and minor.
        num_cores: streaming multiprocessors.
        memory_bytes: total memory that the CUDA driver reports, which is a little less than the data sheet says.
        nominal_bandwidth, nominal_matmul_rate: of the data sheet; products of dense bfloat16 matrices.
        measured_bandwidth, measured_matmul_rate: of a large copy and of a product of 8192 x 8192 matrices, where this
            project has measured them.
    """

    name: str
    device_kind: str
    compute_capability: tuple[int, int]
    num_cores: int
    clock_ghz: float
    l2_bytes: int
    memory_bytes: int
    nominal_bandwidth: float
    nominal_matmul_rate: float
    measured_bandwidth: float | None = None
    measured_matmul_rate: float | None = None

    @property
    def bandwidth(self) -> float:
        """The measured bandwidth, or the nominal one where none was measured."""
        return self.measured_bandwidth or self.nominal_bandwidth

    @property
    def matmul_rate(self) -> float:
        """The measured rate of matrix products, or the nominal one where none was measured."""
        return self.measured_matmul_rate or self.nominal_matmul_rate


H200 = GPU(
    name="h200",
    device_kind="NVIDIA H200",
    compute_capability=(9, 0),
    num_cores=132,
    clock_ghz=1.98,
    l2_bytes=50 * 2**20,
    memory_bytes=150_000_000_000,
    nominal_bandwidth=4.8e12,
    nominal_matmul_rate=989e12,
    measured_bandwidth=4.3e12,
    measured_matmul_rate=790e12,
)
H100 = GPU(
    name="h100",
    device_kind="NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    num_cores=132,
    clock_ghz=1.98,
    l2_bytes=50 * 2**20,
    memory_bytes=84_940_000_000,
    nominal_bandwidth=3.35e12,
    nominal_matmul_rate=989e12,
)
B200 = GPU(
    name="b200",
    device_kind="NVIDIA B200",
    compute_capability=(10, 0),
    num_cores=148,
    clock_ghz=1.965,
    l2_bytes=129_536 * 2**10,
    memory_bytes=191_500_000_000,
    nominal_bandwidth=7.67e12,  # from its driver's bus width and clock; early data sheets say 8 TB/s
    nominal_matmul_rate=2250e12,
)
GPUS = {gpu.name: gpu for gpu in (H200, H100, B200)}


def find_gpu(name: str) -> GPU:
    """Return the GPU called `name`, in upper or lower case.

    Raises:
        ValueError: it is not known; the message names those that are.
    """
    if name.lower() not in GPUS:
        raise ValueError(f"device={name!r} is not known; known: {', '.join(GPUS)}")
    return GPUS[name.lower()]
