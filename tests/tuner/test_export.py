"""Export to T4 and Kernel Tuner: nothing lost, read back by our own reader."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from fake_runs import run_records

from kt.logs.query import Run, runs
