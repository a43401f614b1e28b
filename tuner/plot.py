"""`kt show --plot`: the search as a picture, one panel a workload."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt.logs.query import Run, timed
from kt.logs.record import Timing
from kt.spaces.errors import SettingsError, ToolchainError

from .noise import unstable
from .report import Row
from .text import one_line, time_of, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = 8
FORMATS = ("png", "svg", "pdf")
_METADATA = {"png": {"Software": "kt"}, "svg": {"Creator": "kt"}, "pdf": {"Creator": "kt"}}
_MARKS = {
    b"\x89PNG\r\n\x1a\n": b"\0\0\0\x0btEXtSoftware\0kt",
    b'<?xml version="1.0" encoding="utf-8" standalone="no"?>\n<!DOCTYPE svg ':
        b"<dc:creator>\n     <cc:Agent>\n      <dc:title>kt</dc:title>",
    b"%PDF-1.4\n%\xac\xdc \xab\xba\n": b"/Creator (kt)",
}  # fmt: skip
"""How a file of each format begins, and what that metadata becomes in it.

The beginnings are matplotlib's: a paper that includes a plot may hold the plot's creator too.
"""
_INK, _BEST, _DOT, _FAILED, _CUT = "#1a1a1a", "#0b6e4f", "#7fb8a4", "#c1292e", "#b9b9b9"
_LINES = {"bound": "#6b4fa0", "vendor": "#d17a00", "default": "#4a6fa5"}
_HEADROOM, _APART = 1.08, 0.045
"""Space above the highest value, and between two names, as shares of the axis."""


def is_plot(content: bytes) -> bool:
    """Whether a file is a picture that kt drew: it names kt as its creator."""
    return any(content.startswith(magic) and mark in content for magic, mark in _MARKS.items())


def refuse_format(path: Path) -> None:
    """Raises SettingsError for a file whose suffix names no format of pictures."""
    if _format(path) not in FORMATS:
        raise SettingsError(f"--plot {path}: accepts names that end in .{', .'.join(FORMATS)}")


def picture(runs: Sequence[Run], table: Sequence[Row], path: Path) -> bytes:
    """The run that found each row's best, drawn in the format of the file's suffix.

    Raises KtError when there is nothing to draw, or no such format.
    """
    refuse_format(path)
    by_id = {run.header.run: run for run in runs}
    drawn = [(row, by_id[row.run]) for row in table if row.best and row.run in by_id]
    if not drawn:
        raise SettingsError("--plot: the log has no valid result to draw")
    if len(drawn) > PANELS:
        raise SettingsError(f"--plot: draws up to {PANELS} workloads, not {len(drawn)}: name one")
    figure, panels = _figure(len(drawn))
    for axes, (row, run) in zip(panels, drawn, strict=True):
        _panel(axes, row, run)
    image = io.BytesIO()
    form = _format(path)
    figure.savefig(image, dpi=130, format=form, metadata=_METADATA[form])
    return image.getvalue()


def _format(path: Path) -> str:
    return path.suffix[1:].lower()


def _figure(count: int) -> tuple[Any, list[Axes]]:
    try:
        import matplotlib
    except ImportError:
        raise ToolchainError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4 * count), layout="constrained")
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])


def _panel(axes: Axes, row: Row, run: Run) -> None:
    trials = run.of(row.workload)
    scale = row.flops / 1e3  # microseconds to GFLOP/s
    xs = range(1, len(trials) + 1)
    good = [(x, scale / us) for x, t in zip(xs, trials, strict=True) if (us := timed(t))]
    axes.plot(*zip(*good, strict=True), "o", zorder=3, ms=4, mec="none", color=_DOT, label="trial")
    best, top = [], 0.0
    for trial in trials:
        us = timed(trial)
        top = max(top, scale / us if us else 0.0)
        best.append(top or float("nan"))
    axes.plot(xs, best, color=_BEST, lw=2, zorder=2, drawstyle="steps-post", label="best so far")
    assert row.best
    if row.best.final and row.best.us > 0:
        at = [x for x, t in zip(xs, trials, strict=True) if t.trial == row.best.trial.trial]
        final = scale / row.best.us
        top = max(top, final)
        axes.plot(at, [final] * len(at), "*", ms=13, color=_BEST, mec="white", zorder=6,
                  ls="none", label="winner, in the final")  # fmt: skip
    _references(axes, row, top)
    axes.set_xlim(0, len(trials) + 1)
    _marks(axes, run, row.workload)
    axes.set_title(_title(row), fontsize=10, loc="left", color=_INK, parse_math=False)
    axes.set_xlabel("trials measured")
    axes.set_ylabel("GFLOP/s")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", lw=0.7)
    axes.set_axisbelow(True)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=5, fontsize=8, frameon=False
    )  # below the axes: it hides no trial


def _title(row: Row) -> str:
    over = f", {times(row.over_default)} the default" if row.over_default else ""
    device = one_line(row.target.processor, 60)
    return f"{one_line(row.workload, 90)}\n{time_of(row.us)}{over}, on {device}"


def _references(axes: Axes, row: Row, top: float) -> None:
    """Lines of bound, vendor and default, named in the right margin, names kept apart.

    A time that spread too far to be compared with has none.
    """
    times = {"bound": row.bound_us}
    if not unstable(row.vendor_samples):
        times["vendor"] = row.vendor_us
    if not row.busy:
        times["default"] = row.default_us
    rates = {name: row.flops / 1e3 / us for name, us in times.items() if us is not None and us > 0}
    top = _HEADROOM * max(top, *rates.values(), 0.0)
    axes.set_ylim(0, top or 1.0)
    lowest = 0.0
    for name, rate in sorted(rates.items(), key=lambda item: item[1]):
        axes.axhline(rate, color=_LINES[name], lw=1.2, ls="--", zorder=1)
        at = max(rate, lowest)
        lowest = at + _APART * top
        axes.annotate(
            f"{name} {rate:.4g}", (1, at), xycoords=("axes fraction", "data"), fontsize=8,
            xytext=(4, 0), textcoords="offset points", va="center", color=_LINES[name],
            annotation_clip=False,
        )  # fmt: skip


def _marks(axes: Axes, run: Run, workload: str) -> None:
    """Failures and early cuts, on the axis: they have no throughput."""
    trials = list(enumerate(run.of(workload), 1))
    failed = [x for x, t in trials if not isinstance(t.outcome, Timing)]
    cut = [x for x, t in trials if isinstance(t.outcome, Timing) and t.outcome.censored]
    marks = ((failed, "x", _FAILED, "failed"), (cut, "|", _CUT, "cut early"))
    for places, marker, color, name in marks:
        if places:
            label = f"{name} ({len(places)})"
            axes.plot(places, [0] * len(places), marker, ms=6, mew=1.4, color=color, label=label,
                      ls="none", clip_on=False, zorder=5)  # fmt: skip
