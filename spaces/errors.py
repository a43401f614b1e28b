"""Errors a user can cause, each one sentence: what was wrong and what is accepted.

KtError
├── WorkloadError    a workload that cannot be parsed or cannot exist
├── TargetError      an unknown target, or one this machine cannot serve
├── SpaceError       a θ outside its space, or a space without a legal point
├── LogError         a log that cannot be read or written
├── ToolchainError   a compiler or an optional package that is missing
└── SettingsError    an option value that cannot be honoured

A candidate that fails is not an error but data (`kt.logs.record.Failure`); bugs propagate.
"""

from __future__ import annotations

__all__ = [
    "KtError",
    "LogError",
    "SettingsError",
    "SpaceError",
    "TargetError",
    "ToolchainError",
    "WorkloadError",
]


class KtError(Exception):
    """Base of everything a command reports as one line."""


class WorkloadError(KtError):
    """The workload's text is malformed, or no such computation exists."""


class TargetError(KtError):
    """The target is unknown, or the machine has no such device."""


class SpaceError(KtError):
    """θ is not in the space, or the space is empty."""


class LogError(KtError):
    """A log is missing, of another format or version, or cannot be written."""


class ToolchainError(KtError):
    """A compiler or an optional package is missing; the message holds the install command."""


class SettingsError(KtError):
    """An option has a value that the command cannot honour."""
