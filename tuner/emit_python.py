"""The Python module of an emitted CUDA kernel: the loader, the cubin, and one function."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

from kt.logs.query import Best
from kt.spaces.kernel import Kernel
from kt.spaces.workload import Workload

from .emit import PYTHON_MARK, comment_text, facts, provenance

LOADER = Path(__file__).with_name("cupy_loader.py")
_WIDTH = 96


def module_text(best: Best, kernel: Kernel, workload: Workload, cubin: bytes, log: str) -> str:
    """A module that needs CuPy and nothing of kt. Nothing of the log is in it unescaped."""
    rows = [*provenance(best, workload, log), ("needs", "CuPy")]
    head = "".join(f"# {name:10} {comment_text(value)}\n" for name, value in rows)
    title = f"{PYTHON_MARK}{comment_text(str(workload))}\n#\n"
    return title + head + LOADER.read_text() + _tail(best, kernel, workload, cubin)


def _tail(best: Best, kernel: Kernel, workload: Workload, cubin: bytes) -> str:
    """The kernel's own constants and its function."""
    operands = (*workload.inputs(), workload.output())
    names = ", ".join(operand.name for operand in operands[:-1])
    shapes = ", ".join(f"{o.name}{list(o.shape)} {o.dtype}" for o in operands)
    steps = "".join(f"        Step{_row(step)},\n" for step in _steps(kernel))
    described = json.dumps(facts(best), separators=(",", ":"))
    return f"""

# -- this kernel ----------------------------------------------------------------------------------

DESCRIPTION = {_literal(described)}

KERNEL = Kernel(
    cubin={_literal(base64.b64encode(zlib.compress(cubin, 9)).decode())},
    arch={_ascii(best.target.arch)},
    operands=(
{"".join(f"        Operand{_row((o.name, o.shape, o.dtype))},{chr(10)}" for o in operands)}    ),
    steps=(
{steps}    ),
    workspace_bytes={int(kernel.workspace_bytes)},
    zeroed_bytes={int(kernel.zeroed_bytes)},
)


def launch({names}, *, out=None):
    {_ascii(f"{shapes}: row-major, on one CUDA device. Returns the output.")}
    return KERNEL({names}, out=out)
"""


def _steps(kernel: Kernel) -> list[tuple[object, ...]]:
    return [(s.entry, s.grid, s.block, s.cluster, s.shared_bytes) for s in kernel.launches]


def _row(values: tuple[object, ...]) -> str:
    return f"({', '.join(_ascii(value) for value in values)})"


def _ascii(value: object) -> str:
    """A literal of texts, whole numbers and tuples of them; pure ASCII whatever the text."""
    plain = json.loads(json.dumps(value, default=int))  # plain types: no foreign repr
    return ascii(tuple(plain) if isinstance(plain, list) else plain)


def _literal(value: str) -> str:
    """A long text as lines of literals."""
    pieces = (value[i : i + _WIDTH] for i in range(0, len(value), _WIDTH))
    return "(\n" + "".join(f"        {piece!a}\n" for piece in pieces) + "    )"
