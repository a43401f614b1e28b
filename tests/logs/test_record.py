"""The record schema: one JSON object a line, strict when read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from fake_runs import THETA, header, one_of_each, trial

from kt.logs.record import SCHEMA, Entry, Failure, Record, Settings, Timing
from kt.spaces.theta import COMPONENTS

DECODER = msgspec.json.Decoder(Record)
EVERY = one_of_each()


@pytest.mark.parametrize("record", EVERY, ids=lambda r: type(r).__name__)
def test_a_record_reads_back_equal(record: Record) -> None:
    assert DECODER.decode(msgspec.json.encode(record)) == record


def test_the_types_are_tagged_and_only_trials_have_a_theta_key() -> None:
    lines = [json.loads(msgspec.json.encode(record)) for record in EVERY]
    assert {line["type"] for line in lines} == {"run", "batch", "trial", "final", "resume", "stop"}
    assert all(next(iter(line)) == "type" and line["run"] == "r" for line in lines)

    def keys(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value))
        return (
            set(value) | set().union(*map(keys, value.values()))
            if isinstance(value, dict)
            else set()
        )

    for line in lines:
        assert ("theta" in keys(line)) == (line["type"] == "trial")


def test_theta_is_nested_by_the_seven_components() -> None:
    line = json.loads(msgspec.json.encode(trial(0)))
    assert tuple(line["theta"]) == COMPONENTS
    assert line["theta"]["tile"] == {"bm": 8, "bn": 8, "bk": 8}
    entry = json.loads(msgspec.json.encode(Entry(0, "fake", THETA, "default")))
    assert tuple(entry["knobs"]) == COMPONENTS


def test_outcomes_are_tagged_by_kind_and_say_no_more_than_needed() -> None:
    assert json.loads(msgspec.json.encode(Timing((2.0,), 2.0))) == {
        "kind": "timing", "us": [2.0], "median_us": 2.0
    }  # fmt: skip
    assert json.loads(msgspec.json.encode(Failure("crash", "run", "signal 11"))) == {
        "kind": "failure", "failure": "crash", "stage": "run", "message": "signal 11"
    }  # fmt: skip


def test_the_header_carries_the_schema_version() -> None:
    assert json.loads(msgspec.json.encode(header()))["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("outcome", {"kind": "failure", "failure": "sad", "stage": "run", "message": ""}),
        ("outcome", {"kind": "failure", "failure": "crash", "stage": "later", "message": ""}),
        ("outcome", {"kind": "timing", "us": [], "median_us": None}),
        ("outcome", {"kind": "timing", "us": [], "median_us": 0.0}),
        ("outcome", {"kind": "timing", "us": [], "median_us": -1.0}),
        ("outcome", {"kind": "other"}),
        ("theta", {"tile": {"bm": [8]}}),
        ("theta", {"tile": {"bm": 8.5}}),
        ("trial", "1"),
        ("trial", 1.5),
        ("type", "trail"),
    ],
)
def test_a_value_outside_the_schema_is_not_read(change: str, value: Any) -> None:
    line = json.loads(msgspec.json.encode(trial(0)))
    assert DECODER.decode(json.dumps(line)) == trial(0)
    with pytest.raises(msgspec.ValidationError):
        DECODER.decode(json.dumps(line | {change: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", 0), ("batch_size", 10**9), ("lag", -1), ("lag", 10**6), ("epsilon", 1.5),
     ("model_threads", 0)],
)  # fmt: skip
def test_settings_that_no_search_could_honour_are_not_read(field: str, value: float) -> None:
    settings = json.loads(msgspec.json.encode(Settings())) | {field: value}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(settings), type=Settings)
