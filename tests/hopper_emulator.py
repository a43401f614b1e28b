"""Runs a kernel of ours on TMA and wgmma on the CPU, through `cuda_emulator`.

The instructions of the `hopper_*.cuh` headers are replaced by `emulator/hopper.cuh`; everything
else, the host's side too, is the kernel's own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import cuda_emulator
from cuda_emulator import Array

from kt.spaces.kernel import DEVICE_HEADERS, Kernel

# What stands in for which text of a header: from one mark to another, or to the header's end.
_PARTS = (
    ("cluster barriers", "hopper_barrier.cuh", "// ---- mbarriers", "// A place in a ring"),
    ("groups", "hopper_barrier.cuh", "// ---- barriers of a warpgroup", ""),
    ("boxes", "hopper_tma.cuh", "// ---- instructions", ""),
    ("products", "hopper_wgmma.cuh", "// ---- order", ""),
)
_LAUNCH = "typedef int (*kt_encode_function)"
MOST_THREADS = 4 * 512


def _sections() -> dict[str, str]:
    text = (cuda_emulator.EMULATOR / "hopper.cuh").read_text()
    _, *parts = re.split(r"^// ==== (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def emulated(kernel: Kernel) -> Kernel:
    """The kernel with the instructions of Hopper replaced."""
    sections, source = _sections(), kernel.source
    for names, header, begin, end in _PARTS:
        real = (DEVICE_HEADERS / header).read_text()
        first = real.index(begin)
        body = real[first : real.index(end) if end else real.rindex("#endif")]
        assert source.count(body) == 1, f"the source holds {header} once"
        source = source.replace(body, "".join(sections[name] for name in names.split()))
    source = source.replace("kt_shared_address(kt_shared)", "emu_cta_address()")
    for name in ("load", "store"):
        own = re.compile(rf"(?<!void )(?<!u32 )kt_shared_{name}\(")
        source = own.sub(f"emu_shared_{name}(", source)
    source = source.replace(_LAUNCH, sections["launch"] + _LAUNCH)
    head = (
        f"#include <stdio.h>\n#define EMU_MOST_THREADS {MOST_THREADS}\n#define __grid_constant__\n"
    )
    return dataclasses.replace(kernel, source=head + source + sections["end"])


def run(kernel: Kernel, inputs: Sequence[Array], output: Array, directory: Path) -> list[Array]:
    """The outputs of two launches over one workspace; `output` is what C holds before each."""
    return cuda_emulator.run(emulated(kernel), inputs, output, directory)


def fits(kernel: Kernel) -> bool:
    """Whether the emulator holds a whole cluster."""
    return all(step.block[0] * step.cluster[0] <= MOST_THREADS for step in kernel.launches)
