"""What ptxas, NVIDIA's assembler, reports of the kernels that it compiles: registers, spills, serialised products.

Mosaic GPU prints the report on each kernel to the process's standard output while `MOSAIC_GPU_DUMP_PTXAS` is set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VARIABLE = "MOSAIC_GPU_DUMP_PTXAS"

_ENTRY = r"^.*Compiling entry function '(\w+)_mosaic_gpu_kernel' for '(\w+)'.*$"
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
# Remarks C7510 and following, which differ in the reason.
_SERIALISED = re.compile(
    r"wgmma\.mma_async instructions are serialized due to (.+?) in (?:the )?function '(\w+)_mosaic_"
)


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel: where it runs, registers of a thread, what a thread spills, and why wgmma waits, if so."""

    kernel: str
    target: str
    registers: int
    spilled: int  # bytes stored because there was no register for them, and bytes loaded again
    serialised: tuple[str, ...]  # a reason for each group of wgmma that do not run one after the other


def read_reports(output: str) -> list[KernelReport]:
    """The reports in what a process has printed, in order.

    Raises:
        ValueError: ptxas names a kernel and does not say what it uses and spills.
    """
    reports = []
    # The remarks on a kernel precede the line that names it; its numbers follow that line.
    remarks, *rest = re.split(_ENTRY, output, flags=re.MULTILINE)
    for kernel, target, behind in zip(*[iter(rest)] * 3, strict=True):
        reasons = tuple(reason for reason, function in _SERIALISED.findall(remarks) if function == kernel)
        spills, registers = _SPILLS.search(behind), _REGISTERS.search(behind)
        if spills is None or registers is None:
            raise ValueError(f"ptxas does not say what {kernel} uses and spills, but {behind!r}")
        reports.append(KernelReport(kernel, target, int(registers[1]), sum(map(int, spills.groups())), reasons))
        remarks = behind
    return reports
