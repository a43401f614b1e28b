"""The text of one file with the tuned kernels of many shapes, and a kernel for any other."""

from __future__ import annotations

import json

from kt.spaces.gemm import many
from kt.spaces.together import c_apart, cuda_apart, system_headers

from .backend.nvcc import code_flag
from .chosen import Chosen
from .emit import MARK, c_string, comment_text, facts, provenance
from .shapes import Shapes
from .summary import device_text
from .versions import kt_version

_ANY = "kt_any"
_EXTENTS = "int64_t m, int64_t n, int64_t k, int64_t batch"
_REFUSALS = (
    "-1: an extent is below 1 or above 2^31 - 1; -2: an argument is null or not aligned to {}; "
    "-3: the workspace is null or not aligned to 256 where one is needed"
)
_WORKSPACE = "kt_workspace_bytes_gemm(m, n, k, batch) bytes; the most of all shapes serves each"


def shapes_text(shapes: Shapes, log: str) -> str:
    """The self-contained source: one C file, or one CUDA file."""
    first = shapes.chosen[0]
    prefixes = [f"kt{i}" for i in range(len(shapes.chosen))]
    sources = [_described(chosen) for chosen in shapes.chosen]
    sources.append(many.any_source(shapes.workload, shapes.target))
    if first.kernel.language == "c":
        pool = dict[str, str]()
        named = zip(sources, [*prefixes, _ANY], strict=True)
        parts = [c_apart(source, prefix, pool) for source, prefix in named]
        parts[0] = system_headers(sources) + "\n" + parts[0]
    else:
        parts = [cuda_apart(*pair) for pair in zip(sources, [*prefixes, _ANY], strict=True)]
    titles = [_title(chosen, log) for chosen in shapes.chosen]
    titles.append("/* -- any other extents */\n\n")
    dispatch = many.dispatch_source(
        [chosen.kernel for chosen in shapes.chosen], prefixes, _ANY,
        c_string(json.dumps(shapes_facts(shapes), separators=(",", ":"))), shapes.target,
    )  # fmt: skip
    bodies = [title + part for title, part in zip(titles, parts, strict=True)]
    return "\n".join([_head(shapes), *bodies, "/* -- dispatch */\n\n" + dispatch])


def shapes_facts(shapes: Shapes) -> dict[str, object]:
    """What is known of the whole file; each kernel's own record is in its text."""
    target, w = shapes.target, shapes.workload
    options = {o.key: o.show(getattr(w, o.field)) for o in w.OPTIONS if o.field != "batch"}
    return {
        "kt_kernel": 1, "kt": kt_version(), "operator": w.OPERATOR, **options,
        "device": {"name": target.name, "arch": target.arch, "processor": target.processor,
                   "cores": target.cores},
        "workloads": [chosen.best.workload for chosen in shapes.chosen],
    }  # fmt: skip


def _described(chosen: Chosen) -> str:
    """A kernel's source with its record."""
    described = json.dumps(facts(chosen.best), separators=(",", ":"))
    return f"#define KT_DESCRIBE {c_string(described)}\n\n{chosen.kernel.source}"


def _title(chosen: Chosen, log: str) -> str:
    """The comment above one kernel."""
    rows = provenance(chosen.best, chosen.workload, log)
    lines = [f" * {name:10} {comment_text(value)}\n" for name, value in rows]
    return f"/* -- {comment_text(str(chosen.workload))}\n{''.join(lines)} */\n\n"


def _head(shapes: Shapes) -> str:
    """What the file holds, how it is built and called."""
    on_cpu = shapes.target.kind == "cpu"
    rows = [
        ("device", device_text(shapes.target)),
        *(_use_on_cpu() if on_cpu else _use_on_cuda(shapes.target.arch)),
        ("args", ", ".join(f"{o.name} {o.dtype}" for o in shapes.workload.operands())),
        (
            "tuned",
            f"{len(shapes.chosen)} shapes; any other runs on a plain, slower kernel",
        ),
        ("kt", kt_version()),
    ]
    options = " ".join(str(shapes.workload).split()[2:])
    lines = "".join(f" * {name:10} {comment_text(value)}\n" for name, value in rows)
    return f"{MARK}gemm of many shapes, {comment_text(options)}\n *\n{lines} */\n"


def _use_on_cpu() -> list[tuple[str, str]]:
    return [
        ("build", "cc -O3 -shared -fPIC -pthread -o kernel.so kernel.c -lm"),
        ("call", f"int kt_launch_gemm({_EXTENTS}, void *const *args, void *workspace)"),
        ("returns", f"0 = done; {_REFUSALS.format('its element type')}"),
        ("workspace", _WORKSPACE),
    ]


def _use_on_cuda(arch: str) -> list[tuple[str, str]]:
    return [
        ("build", f"nvcc -O3 {code_flag(arch)} --shared -Xcompiler -fPIC -o kernel.so kernel.cu"),
        ("call", f"int kt_launch_gemm({_EXTENTS}, void *const *args, void *workspace, "
                 "void *stream)"),
        ("returns", f"0 once it is enqueued, or a cudaError_t; {_REFUSALS.format('16')}"),
        ("workspace", f"{_WORKSPACE}, for one stream at a time"),
        ("zeroed", "of any, the first kt_workspace_zeroed_bytes_gemm() before the first launch; "
                   "every launch leaves them zero"),
    ]  # fmt: skip
