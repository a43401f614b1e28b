"""Recordings of other tools: read with failures kept, searched, refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from foreign_files import cache, cache_lines, configurations, milliseconds, t1, t4, write

from kt.logs.record import Settings
from kt.spaces.errors import LogError
from kt.spaces.knob import Categorical, Ordinal
from kt.tuner.constraints import read_description
from kt.tuner.foreign import ABSENT, read_recording
from kt.tuner.foreign_space import ForeignSpace, Levels, outcomes
from kt.tuner.simulate import trace
from kt.tuner.strategy import STRATEGIES


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
@pytest.mark.parametrize("make", [t4, cache])
def test_both_formats_say_the_same_plain_and_compressed(
    tmp_path: Path, make: object, name: str
) -> None:
    recording = read_recording(write(tmp_path / name, make()))  # type: ignore[operator]
    assert recording is not None
    assert dict(recording.parameters) == {
        "x": (1, 2, 4, 8), "y": (16, 32, 48, 64), "mode": ("a", "b"),
    }  # fmt: skip
    assert [r.values for r in recording.results] == configurations()
    for result in recording.results:
        ms = milliseconds(*result.values)  # type: ignore[arg-type]
        assert result.us == (None if ms is None else pytest.approx(1000 * ms))
        assert result.seconds == pytest.approx((103 + 3 * (ms or 0)) / 1000)
    assert sum(recording.failures.values()) == sum(
        milliseconds(*c) is None for c in configurations()
    )


def test_a_cache_that_is_still_open_or_was_cut_off_ends_at_its_last_entry(tmp_path: Path) -> None:
    text = cache_lines(cache())
    path = tmp_path / "cache.json"
    for cut, missing in ((text, 0), (text + "\n", 0), (text.rstrip(","), 0), (text[:-40], 1)):
        path.write_text(cut)
        recording = read_recording(path)
        assert recording is not None
        assert [r.values for r in recording.results] == configurations()[
            : len(configurations()) - missing
        ]


def test_a_log_of_kt_and_other_files_are_no_recordings(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for content in ('{"type":"run"}\n{"type":"batch"}\n', "", "x", "[1]", '{"a": 1}'):
        path.write_text(content)
        assert read_recording(path) is None
    assert read_recording(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["results"].clear(), "no configuration"),
        (lambda d: d["results"][3]["configuration"].pop("x"), "result 3 lacks a parameter"),
        (lambda d: d["results"][0]["configuration"].update(x=[1]), "no number or text"),
        (lambda d: d["metadata"].update(timeunit="fortnights"), "fortnights"),
    ],
)
def test_what_cannot_be_understood_is_refused_in_one_line(
    tmp_path: Path, change: object, message: str
) -> None:
    document = t4()
    change(document)  # type: ignore[operator]
    with pytest.raises(LogError, match=message):
        read_recording(write(tmp_path / "r.json", document))


def test_a_configuration_counts_once_and_an_absent_parameter_is_a_value(tmp_path: Path) -> None:
    document = t4()
    document["results"].append(document["results"][0] | {"invalidity": "compile"})
    document["results"].append({**document["results"][1], "configuration": {
        "x": 1, "y": 16, "mode": None}})  # fmt: skip
    recording = read_recording(write(tmp_path / "r.json", document))
    assert recording is not None
    assert len(recording.results) == len(configurations()) + 1
    assert recording.results[0].us is not None
    assert recording.parameters["mode"] == ("a", ABSENT, "b")


def space_of(tmp_path: Path, document: object, description: object = None) -> ForeignSpace:
    recording = read_recording(write(tmp_path / "r.json", document))
    assert recording is not None
    described = description and read_description(write(tmp_path / "t1.json", description))
    return ForeignSpace(recording, described)  # type: ignore[arg-type]


def test_parameters_become_knobs_and_results_points(tmp_path: Path) -> None:
    document = t4()
    for i, result in enumerate(document["results"]):
        result["configuration"] |= {"share": (0.5, 0.25)[i % 2], "flag": i % 3 == 0}
    where = space_of(tmp_path, document)
    kinds = {knob.name: type(knob) for knob in where.parts[0].knobs}
    assert kinds == {
        "x": Ordinal, "y": Ordinal, "mode": Categorical, "share": Levels, "flag": Categorical,
    }  # fmt: skip
    for point, result in zip(where.order.tolist(), document["results"], strict=True):
        wanted = {f"tile.{k}": v for k, v in result["configuration"].items()}
        wanted["tile.share"] = str(wanted["tile.share"])
        assert where.theta(point).flat() == wanted
    column = where.feature_names.index("tile.share")
    assert set(where.encode(where.order)[:, column].tolist()) == {0.5, 0.25}


def test_derived_features_are_products_and_powers_of_two(tmp_path: Path) -> None:
    where = space_of(tmp_path, t4())
    rows = dict(zip(where.feature_names, where.encode(where.order).T, strict=True))
    xs, ys, _ = zip(*configurations(), strict=True)
    np.testing.assert_allclose(rows["derived.x*y"], np.multiply(xs, ys))
    np.testing.assert_allclose(rows["derived.power(y)"], [y & -y for y in ys])


def test_a_description_gives_the_default_and_checks_the_recording(tmp_path: Path) -> None:
    bare = space_of(tmp_path, t4())
    assert not len(bare.defaults())
    where = space_of(tmp_path, t4(), t1("x * y <= 384", x=2, y=32, mode="b"))
    assert where.theta(int(where.defaults()[0])).flat() == {
        "tile.x": 2, "tile.y": 32, "tile.mode": "b",
    }  # fmt: skip
    assert where.disagreements == 0
    assert space_of(tmp_path, t4(), t1("x * y < 384")).disagreements > 0


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ("x == 4 and not y < 48", lambda x, y: x == 4 and not y < 48),
        ("x % 2 == 0 or y // 16 == 3", lambda x, y: x % 2 == 0 or y // 16 == 3),
        ("16 <= x * y <= 128", lambda x, y: 16 <= x * y <= 128),
        ("max(x, y / 16) - -1 <= 2 ** 2", lambda x, y: max(x, y / 16) + 1 <= 4),
        ("True", lambda x, y: True),
    ],
)
def test_conditions_mean_what_they_mean_in_python(tmp_path: Path, text: str, keeps: object) -> None:
    where = space_of(tmp_path, t4(), t1(text))
    kept = where.parts[0].legal(where.order)
    expected = [bool(keeps(x, y)) for x, y, _ in configurations()]  # type: ignore[operator]
    assert kept.tolist() == expected


@pytest.mark.parametrize(
    "text", ["__import__('os').system('x')", "x.real", "[x]", "x if y else x", "x +", "x is y"]
)
def test_other_expressions_are_refused_and_never_executed(tmp_path: Path, text: str) -> None:
    with pytest.raises(LogError, match="condition"):
        read_description(write(tmp_path / "t1.json", t1(text)))
    with pytest.raises(LogError, match="not a T1"):
        read_description(write(tmp_path / "t1.json", {"General": {}}))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lag", [0, 1])
def test_every_strategy_searches_a_recording_to_its_end(
    tmp_path: Path, strategy: str, lag: int
) -> None:
    recording = read_recording(write(tmp_path / "r.json", t4()))
    assert recording is not None
    where = ForeignSpace(recording)
    settings = Settings(strategy=strategy, revision=2, batch_size=4, lag=lag)
    order = trace(where, outcomes(where, recording), settings, 0, 10**6).tolist()
    assert sorted(order) == sorted(where.order.tolist())
    again = trace(where, outcomes(where, recording), settings, 0, 12).tolist()
    assert again == order[:12]


def test_numbers_in_the_file_are_not_trusted(tmp_path: Path) -> None:
    document = t4()
    document["results"][0]["measurements"][0]["value"] = -1.0
    document["results"][1]["measurements"][0]["value"] = True
    text = json.dumps(document).replace('"value": 4.0', '"value": Infinity', 1)
    (tmp_path / "r.json").write_text(text)
    recording = read_recording(tmp_path / "r.json")
    assert recording is not None
    assert recording.failures["no time"] == 3
