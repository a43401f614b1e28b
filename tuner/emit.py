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
from kt.spaces.workload import Workload

from . import text
from .versions import kt_version

MARK = "/* kt kernel: "
JSON_MARK = '{"kt_kernel"'
BUILD = "cc -O3 -shared -fPIC -pthread -o kernel.so kernel.c -lm"
_LONGEST = 2000
_C_TYPES = {"fp32": "float", "fp64": "double"}


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
        "default_us": best.default_us,
        "device": {"name": target.name, "arch": target.arch, "processor": target.processor,
                   "cores": target.cores},
        "run": trial.run, "trial": trial.trial, "time": trial.time,
    }  # fmt: skip


def c_text(best: Best, kernel: Kernel, workload: Workload, log: str) -> str:
    """The self-contained C file."""
    described = json.dumps(facts(best), separators=(",", ":"))
    define = f"#define KT_DESCRIBE {c_string(described)}\n\n"
    return _comment(best, workload, log) + define + kernel.source


def json_text(best: Best) -> str:
    """The facts and the whole record as JSON."""
    return json.dumps(facts(best) | {"record": msgspec.to_builtins(best.trial)}) + "\n"


def _comment(best: Best, workload: Workload, log: str) -> str:
    trial, target = best.trial, best.target
    arguments = ", ".join(
        f"{'const ' if i + 1 < len(operands) else ''}{_C_TYPES.get(o.dtype, o.dtype)} {o.name}"
        + "".join(f"[{extent}]" for extent in o.shape)
        for operands in [(*workload.inputs(), workload.output())]
        for i, o in enumerate(operands)
    )
    rows = [
        ("theta", str(trial.theta)),
        ("family", trial.family),
        ("time", _time_text(best, workload)),
        ("device", f"{target.processor} ({target.arch}, {target.cores} cores)"),
        ("measured", f"{trial.time} in run {trial.run}, trial {trial.trial} of {log}"),
        ("kt", kt_version()),
        ("build", BUILD),
        ("call", "int kt_launch(void *const *args, void *workspace), 0 = done"),
        ("args", arguments),
        ("workspace", "kt_workspace_bytes() bytes, aligned to 256"),
    ]
    lines = [f" * {name:10} {comment_text(value)}\n" for name, value in rows]
    return f"{MARK}{comment_text(str(workload))}\n *\n{''.join(lines)} */\n"


def _time_text(best: Best, workload: Workload) -> str:
    if not best.us:
        return "none: this trial failed or was cut early"
    default = f", default {best.default_us:.1f} us" if best.default_us else ""
    return f"{best.us:.1f} us ({text.rate_of(workload.flops, best.us)}){default}"


def is_ours(head: bytes) -> bool:
    """Whether a file with this beginning is a kernel that kt wrote, and may be replaced."""
    return not head or head.startswith((MARK.encode(), JSON_MARK.encode()))
