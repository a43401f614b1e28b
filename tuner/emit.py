"""The text of an emitted kernel: provenance comment, the record as a string, the measured source.

Everything that comes from a log is untrusted: nothing of it reaches the C text unescaped.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from kt.logs.query import Best
from kt.spaces.kernel import Kernel
from kt.spaces.workload import Attention, Conv2d, Workload

from . import text
from .backend.nvcc import code_flag
from .noise import busy
from .versions import kt_version

MARK = "/* kt kernel: "
PYTHON_MARK = "# kt kernel: "
JSON_MARK = '{"kt_kernel"'
CUBIN_MARK = (b"\x7fELF", b".text.kt_kernel")
"""How a cubin begins, and the section that every one of ours has."""
_LONGEST = 2000
_C_TYPES = {"fp32": "float", "fp64": "double", "tf32": "float", "int32": "int",
            "int8": "signed char"}  # fmt: skip


def comment_text(foreign: str) -> str:
    """`foreign` fit for the inside of a C comment: printable ASCII that cannot end it."""
    if len(foreign) > _LONGEST:
        foreign = foreign[:_LONGEST] + "..."
    safe = "".join(c if " " <= c <= "~" and c != "\\" else f"<U+{ord(c):04X}>" for c in foreign)
    safe = re.sub(r"\*(?=/)|/(?=\*)", r"\g<0> ", safe)
    return re.sub(r"\?(?=\?)", "? ", safe)  # no trigraphs


def c_string(foreign: str) -> str:
    """`foreign` as a C string literal, of UTF-8 bytes."""
    return '"' + "".join(map(_escaped, foreign.encode("utf-8", "surrogatepass"))) + '"'


def _escaped(byte: int) -> str:
    if chr(byte) in '"\\?':  # an escaped ? begins no trigraph
        return "\\" + chr(byte)
    return chr(byte) if 0x20 <= byte < 0x7F else f"\\{byte:03o}"


def facts(best: Best) -> dict[str, Any]:
    """What is worth knowing of a kernel where it is used; the record without its samples."""
    trial, target = best.trial, best.target
    return {
        "kt_kernel": 1, "kt": kt_version(), "workload": best.workload, "family": trial.family,
        "theta": msgspec.to_builtins(trial.theta), "median_us": best.us or None,
        "default_us": _default_us(best),
        "device": {"name": target.name, "arch": target.arch, "processor": target.processor,
                   "cores": target.cores},
        "run": trial.run, "trial": trial.trial, "time": trial.time,
    }  # fmt: skip


def source_text(best: Best, kernel: Kernel, workload: Workload, log: str) -> str:
    """The self-contained source: one C file, or one CUDA file."""
    described = json.dumps(facts(best), separators=(",", ":"))
    define = f"#define KT_DESCRIBE {c_string(described)}\n\n"
    rows = [*provenance(best, workload, log), *_use(best, kernel, workload), *notes(workload)]
    lines = [f" * {name:10} {comment_text(value)}\n" for name, value in rows]
    head = f"{MARK}{comment_text(str(workload))}\n *\n{''.join(lines)} */\n"
    return head + define + kernel.source


def json_text(best: Best) -> str:
    """The facts and the whole record as JSON."""
    return json.dumps(facts(best) | {"record": msgspec.to_builtins(best.trial)}) + "\n"


def provenance(best: Best, workload: Workload, log: str) -> list[tuple[str, str]]:
    """Where a kernel comes from: names and values, not escaped yet."""
    trial, target = best.trial, best.target
    cores = "cores" if target.kind == "cpu" else "SMs"
    return [
        ("theta", str(trial.theta)),
        ("family", trial.family),
        ("time", _time_text(best, workload)),
        ("device", f"{target.processor} ({target.arch}, {target.cores} {cores})"),
        (
            ("predicted", f"from {log}")
            if trial.source == "predicted"
            else ("measured", f"{trial.time} in run {trial.run}, trial {trial.trial} of {log}")
        ),
        ("kt", kt_version()),
    ]


def _use(best: Best, kernel: Kernel, workload: Workload) -> list[tuple[str, str]]:
    """How the source is built and called."""
    arguments = ", ".join(
        f"{const}{_C_TYPES.get(o.dtype, o.dtype)} {o.name}"
        + "".join(f"[{extent}]" for extent in o.shape)
        for const, operands in (("const ", workload.inputs()), ("", workload.outputs()))
        for o in operands
    )
    if kernel.language == "c":
        return [
            ("build", "cc -O3 -shared -fPIC -pthread -o kernel.so kernel.c -lm"),
            ("call", "int kt_launch(void *const *args, void *workspace), 0 = done"),
            ("args", arguments),
            ("workspace", "kt_workspace_bytes() bytes, aligned to 256"),
        ]
    compiler = f"nvcc -O3 {code_flag(best.target.arch)} --shared -Xcompiler -fPIC"
    return [
        ("build", f"{compiler} -o kernel.so kernel.cu"),
        ("call", "int kt_launch(void *const *args, void *workspace, void *stream)"),
        ("returns", "0 once it is enqueued, else a cudaError_t; allocates nothing"),
        ("args", f"{arguments}; on the device, aligned to 16"),
        ("workspace", f"kt_workspace_bytes() = {kernel.workspace_bytes} bytes, aligned to 256, for "
                      "one stream at a time"),
        ("zeroed", f"the first kt_workspace_zeroed_bytes() = {kernel.zeroed_bytes} of them, before "
                   "the first launch; every launch leaves them zero"),
    ]  # fmt: skip


def notes(workload: Workload) -> list[tuple[str, str]]:
    """What the shapes of the arguments do not say of an operator."""
    match workload:
        case Conv2d():
            return [("layout", "x NHWC, w KRSC with the channels of one group, y NPQK")]
        case Attention():
            order = "[B, S, H, D]" if workload.layout == "bshd" else "[B, H, S, D]"
            lse = "float [B, H, S] whatever the element type: natural log-sum-exp of each row"
            both = " and lse = -inf" if workload.lse else ""
            return [
                ("layout", f"{order}; a causal mask ends at the last query and the last key"),
                ("masked", f"a query that sees no key gets o = 0{both}"),
                *([("lse", lse)] if workload.lse else []),
            ]
        case _:
            return []


def _time_text(best: Best, workload: Workload) -> str:
    if best.trial.source == "predicted":
        return "none: predicted from logs of other shapes, never measured"
    if not best.us:
        return "none: this trial failed or was cut early"
    us = _default_us(best)
    default = f", default {us:.1f} us" if us else ""
    return f"{best.us:.1f} us ({text.rate_of(workload.flops, best.us)}){default}"


def _default_us(best: Best) -> float | None:
    """The default's time, where the two can be compared."""
    return None if busy(best.final) else best.default_us


def is_ours(content: bytes) -> bool:
    """Whether a file that begins with `content` is a kernel that kt wrote, and may be replaced."""
    magic, section = CUBIN_MARK
    if content.startswith(magic):
        return section in content
    marks = (MARK, PYTHON_MARK, JSON_MARK)
    return content.startswith(tuple(mark.encode() for mark in marks))
