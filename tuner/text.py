"""How numbers and foreign text read: units for people, nothing unprintable on a terminal."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

_BARS = "▁▂▃▄▅▆▇█"
DASH = "–"
LONGEST = 2000
"""Characters of foreign text that a message shows."""


def printable(text: str, most: int = LONGEST) -> str:
    """`text` with control characters escaped and an excessive length cut."""
    if len(text) > most:
        text = f"{text[:most]}… ({len(text)} characters)"
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(text: str, most: int = LONGEST) -> str:
    """`printable`, with line ends escaped too."""
    return printable(text, most).replace("\n", "\\n")


def time_of(us: float | None) -> str:
    """A time given in microseconds."""
    if us is None or not math.isfinite(us):
        return DASH
    for limit, scale, unit in ((1e4, 1.0, "µs"), (1e7, 1e-3, "ms")):
        if us < limit:
            return f"{us * scale:.4g} {unit}" if us * scale < 1000 else f"{us * scale:.0f} {unit}"
    return duration(us / 1e6)


def span_of(low: float, high: float) -> str:
    """Two times given in microseconds, as a range: 0.2–36 ms."""
    unit = time_of(high).rpartition(" ")[2]
    scale = {"µs": 1.0, "ms": 1e-3}.get(unit)
    if scale is None:
        return f"{time_of(low)}–{time_of(high)}"
    return (
        f"{low * scale:.2g}–{high * scale:.2g} {unit}"
        if high * scale < 99
        else f"{_whole(low * scale)}–{_whole(high * scale)} {unit}"
    )


def _whole(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """A span of time: 42 s, 3 min 10 s, 2 h 5 min."""
    if not math.isfinite(seconds):
        return DASH
    if seconds < 10:
        return f"{seconds:.1f} s"
    if round(seconds) < 100:
        return f"{seconds:.0f} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {left} s"
    return f"{minutes // 60} h {minutes % 60} min"


def rate_of(flops: float, us: float | None) -> str:
    """Throughput of `flops` operations in `us` microseconds."""
    if us is None or us <= 0:
        return DASH
    gflops = flops / us / 1e3
    return f"{_whole(gflops / 1e3)} TFLOP/s" if gflops >= 9995 else f"{gflops:.4g} GFLOP/s"


def quotient(over: float | None, under: float | None) -> float | None:
    """`over / under`, None when one is missing or makes no sense."""
    if over is None or under is None or over <= 0 or under <= 0:
        return None
    value = over / under
    return value if math.isfinite(value) else None


def ratio(over: float | None, under: float | None) -> str:
    """`over / under` as 1.23x."""
    return times(quotient(over, under))


def times(value: float | None) -> str:
    """A ratio as 1.23x."""
    return DASH if value is None else f"{value:.2f}x"


def percent(over: float | None, under: float | None) -> str:
    """`over / under` as 45 %."""
    value = quotient(over, under)
    return DASH if value is None else f"{100 * value:.0f} %"


def of_bound(bound: float | None, us: float | None) -> str:
    """The share of the bound that a time reaches; a bound that is beaten was measured too low."""
    value = quotient(bound, us)
    return "≥ 100 %" if value is not None and value > 1 else percent(bound, us)


def counts(found: Mapping[str, int], none: str = "none") -> str:
    """`crash 2, wrong_result 1`."""
    return ", ".join(f"{name} {count}" for name, count in found.items()) or none


def number_of(count: int, noun: str) -> str:
    """`1 batch`, `2 batches`."""
    plural = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{plural}"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """A curve in one line of text, resampled to at most `width` characters."""
    if len(values) > width:
        values = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
    if not values:
        return ""
    if not all(map(math.isfinite, values)):
        return DASH
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[int((v - low) / span * (len(_BARS) - 1) + 0.5)] for v in values)


def columns(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as aligned lines; the columns of `right` are flush right."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    )
    return [line.rstrip() for line in lines]
