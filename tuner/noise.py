"""When times spread too far for a ratio of them to be claimed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from kt.logs.record import FinalRecord

from .backend.timing import relative_half_width
from .text import span_of, time_of

UNSTABLE = 0.2
"""Relative half-width of a median above which it is shown as a range."""


def noise_of(samples: Sequence[float]) -> float | None:
    """Relative half-width of the samples' median (95 %); None without samples."""
    return relative_half_width(samples) if samples else None


def unstable(samples: Sequence[float]) -> bool:
    """Whether the samples' median says too little to be compared with."""
    return (noise_of(samples) or 0.0) > UNSTABLE


def unstable_text(samples: Sequence[float]) -> str:
    """`unstable (0.2–36 ms)`."""
    return f"unstable ({span_of(min(samples), max(samples))})"


def median_text(samples: Sequence[float]) -> str:
    """The samples' median, or their range where it says too little."""
    if not samples:
        return time_of(None)
    return unstable_text(samples) if unstable(samples) else time_of(statistics.median(samples))


def busy(final: FinalRecord | None) -> bool:
    """Whether the machine was too busy for the final's times to be compared."""
    if final is None:
        return False
    compared = [entry.us for entry in final.entries if entry.trial in (final.best, final.default)]
    return final.noise > UNSTABLE or any(map(unstable, compared))
