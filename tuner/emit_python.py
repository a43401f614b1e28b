"""The Python module of an emitted CUDA kernel: the loader, the cubin, and its functions."""

from __future__ import annotations

import ast
import base64
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kt.logs.query import Best
from kt.spaces.kernel import MAP_SWIZZLES, MAP_TYPES, Kernel, Launch, TensorMap
from kt.spaces.workload import Attention, Conv2d, Operand, Workload

from .emit import PYTHON_MARK, comment_text, facts, notes, provenance

_HERE = Path(__file__).parent
_LOADER = ("cupy_tensors.py", "cupy_loader.py")
_DROP_IN = {"conv2d": "torch_conv2d.py", "attention": "torch_attention.py"}
"""What makes a module a drop-in for a function of torch, by operator."""
_WIDTH = 96
_CHANNELS_LAST, _HEADS_SECOND = (0, 2, 3, 1), (0, 2, 1, 3)
"""The caller's axis behind each of the kernel's: NCHW for NHWC, and [B, H, S, D] for BSHD."""


def module_text(best: Best, kernel: Kernel, workload: Workload, cubin: bytes, log: str) -> str:
    """A module that needs CuPy and nothing of kt. Nothing of the log is in it unescaped."""
    rows = [*provenance(best, workload, log), *notes(workload), ("needs", "CuPy")]
    head = "".join(f"# {name:10} {comment_text(value)}\n" for name, value in rows)
    title = f"{PYTHON_MARK}{comment_text(str(workload))}\n#\n"
    files = [*_LOADER, *filter(None, [_DROP_IN.get(workload.OPERATOR)])]
    return title + head + _joined(files) + _tail(best, kernel, workload, cubin)


def _joined(files: Sequence[str]) -> str:
    """Files of ours as one: the loader's docstring, the imports of all, their bodies."""
    texts = [(_HERE / name).read_text() for name in files]
    trees = [ast.parse(text) for text in texts]
    doc = ast.get_docstring(trees[len(_LOADER) - 1], clean=False)
    imports = _imports(trees)
    bodies = [_body(text, tree) for text, tree in zip(texts, trees, strict=True)]
    head = f'"""{doc}"""\n\nfrom __future__ import annotations\n\n{imports}\n\n'
    return head + "\n\n\n".join(bodies) + "\n"


def _imports(trees: Sequence[ast.Module]) -> str:
    """The imports of the standard library at the top of files, as one sorted block."""
    plain, named = set[str](), dict[str, set[str]]()
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.Import):
            plain |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named.setdefault(node.module, set()).update(alias.name for alias in node.names)
    del named["__future__"]
    named["typing"].discard("TYPE_CHECKING")
    lines = [f"import {name}" for name in sorted(plain)]
    lines += [f"from {name} import {', '.join(sorted(named[name]))}" for name in sorted(named)]
    return "\n".join(lines)


def _body(text: str, tree: ast.Module) -> str:
    """What follows the docstring and the imports."""
    skipped = ast.Import | ast.ImportFrom | ast.If | ast.Expr
    last = 0
    for node in tree.body:
        if not isinstance(node, skipped):
            break
        last = node.end_lineno or 0
    return "\n".join(text.splitlines()[last:]).strip("\n")


def _tail(best: Best, kernel: Kernel, workload: Workload, cubin: bytes) -> str:
    """The kernel's own constants and its functions."""
    inputs, outputs = workload.inputs(), workload.outputs()
    names = ", ".join(operand.name for operand in inputs)
    shapes = ", ".join(f"{o.name}{list(o.shape)} {o.dtype}" for o in (*inputs, *outputs))
    returned = "the output" if len(outputs) == 1 else ", ".join(o.name for o in outputs)
    steps = "".join(map(_step, kernel.launches))
    described = json.dumps(facts(best), separators=(",", ":"))
    text = f"""

# -- this kernel ----------------------------------------------------------------------------------

DESCRIPTION = {_literal(described)}

KERNEL = Kernel(
    cubin={_literal(base64.b64encode(zlib.compress(cubin, 9)).decode())},
    arch={_ascii(best.target.arch)},
    operands=(
{_operands(workload.operands())}    ),
    steps=(
{steps}    ),
    workspace_bytes={int(kernel.workspace_bytes)},
    zeroed_bytes={int(kernel.zeroed_bytes)},
    outputs={len(outputs)},
)


def launch({names}, *, out=None):
    {_ascii(f"{shapes}: row-major, on one CUDA device. Returns {returned}.")}
    return KERNEL({names}, out=out)
"""
    match workload:
        case Conv2d():
            return text + _conv2d(workload)
        case Attention():
            return text + _attention(workload)
        case _:
            return text


def _conv2d(workload: Conv2d) -> str:
    """The drop-in for torch.nn.functional.conv2d."""
    names = {"x": "input", "w": "weight", "y": "output"}
    views = (
        _seen(operand, names, _CHANNELS_LAST, "in channels_last memory")
        for operand in workload.operands()
    )
    steps = {"stride": workload.stride, "padding": workload.pad, "dilation": workload.dilation}
    return f"""

conv2d = Conv2d(
    KERNEL,
    operands=(
{_rows(views)}    ),
    steps={{{", ".join(f"{name!r}: {_ascii(pair)}" for name, pair in steps.items())}}},
    groups={workload.groups},
    epilogue={_ascii("+".join(workload.epilogue))},
    tuned_for={_ascii(str(workload))},
).conv2d
"""


def _attention(workload: Attention) -> str:
    """The drop-in for torch's scaled_dot_product_attention."""
    names = {"q": "query", "k": "key", "v": "value", "o": "the output"}
    transposed = workload.layout == "bshd"
    order = _HEADS_SECOND if transposed else ()
    memory = "contiguous as transpose(1, 2)" if transposed else ""
    views = (_seen(operand, names, order, memory) for operand in workload.operands())
    return f"""

scaled_dot_product_attention = Attention(
    KERNEL,
    operands=(
{_rows(views)}    ),
    causal={workload.causal},
    window={workload.window},
    scale={workload.scale or 1 / math.sqrt(workload.d)!r},
    softcap={workload.softcap!r},
    tuned_for={_ascii(str(workload))},
).scaled_dot_product_attention
"""


def _seen(
    operand: Operand, names: dict[str, str], order: tuple[int, ...], memory: str
) -> tuple[object, ...]:
    """A four-dimensional operand with its axes as the caller has them."""
    name = names.get(operand.name, operand.name)
    if len(operand.shape) != 4 or not order:
        return (name, operand.shape, operand.dtype)
    shape = tuple(operand.shape[order.index(axis)] for axis in range(4))
    return (name, shape, operand.dtype, order, memory)


def _operands(operands: Sequence[Operand]) -> str:
    return _rows((o.name, o.shape, o.dtype) for o in operands)


def _rows(rows: Iterator[tuple[object, ...]]) -> str:
    return "".join(f"        Operand{_row(row)},\n" for row in rows)


def _step(s: Launch) -> str:
    row = (s.entry, s.grid, s.block, s.cluster, s.shared_bytes, s.early, s.resident)
    if not s.maps:
        return f"        Step{_row(row)},\n"
    maps = "".join(f"            Map{_row(_map(tensor))},\n" for tensor in s.maps)
    return f"        Step{_row(row)[:-1]}, (\n{maps}        )),\n"


def _map(m: TensorMap) -> tuple[object, ...]:
    """The fields of the loader's Map."""
    numbers = MAP_TYPES[m.dtype], m.extents, m.strides, m.box, m.all_steps
    return (m.argument, m.offset, *numbers, MAP_SWIZZLES[m.swizzle])


def _row(values: tuple[object, ...]) -> str:
    return f"({', '.join(_ascii(value) for value in values)})"


def _ascii(value: object) -> str:
    """A literal of texts, numbers, truths and tuples of them; pure ASCII whatever the text."""
    plain = json.loads(json.dumps(value, default=int))  # plain types: no foreign repr
    return ascii(tuple(plain) if isinstance(plain, list) else plain)


def _literal(value: str) -> str:
    """A long text as lines of literals."""
    pieces = (value[i : i + _WIDTH] for i in range(0, len(value), _WIDTH))
    return "(\n" + "".join(f"        {piece!a}\n" for piece in pieces) + "    )"
