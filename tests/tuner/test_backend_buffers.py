"""Guards that notice, and sets that rotate through more memory than the caches hold."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kt.tuner.backend.buffers import ALIGN, PAGE, Guarded, RotatingSets, address


@pytest.mark.parametrize("size", [1, 100, PAGE, PAGE + 1, 3 * PAGE - 8])
@pytest.mark.parametrize("edge", [False, True])
def test_writes_beside_a_buffer_are_seen_once(size: int, edge: bool) -> None:
    buffer = Guarded(size, edge=edge)
    buffer.poison()
    assert buffer.trespass() is None
    ctypes.memset(buffer.address - 8, 0, 8)
    assert buffer.trespass() == "1 bytes before its start"
    if not edge:
        ctypes.memset(buffer.address + size + 99, 0, 1)
        assert buffer.trespass() == "100 bytes after its end"
    assert buffer.trespass() is None


def test_operands_are_aligned_to_no_more_than_malloc_promises() -> None:
    assert Guarded(1000).address % 64 == 16
    assert Guarded(1000, ALIGN).address % ALIGN == 0
    assert Guarded(1004, edge=True).address % 16 == 0


def test_a_buffer_at_the_edge_ends_within_16_bytes_of_it() -> None:
    buffer = Guarded(1004, edge=True)
    assert (buffer.address + 1004 + 15) // PAGE == (buffer.address + 1004) // PAGE + 1


def test_a_workspace_shrinks_and_grows_in_place() -> None:
    buffer = Guarded(3 * PAGE, ALIGN)
    start = buffer.address
    assert buffer.resize(100) and (buffer.address, buffer.size) == (start, 100)
    ctypes.memset(start + 100, 0, 1)
    assert buffer.trespass() == "1 bytes after its end"
    assert buffer.resize(3 * PAGE) and not buffer.resize(3 * PAGE + 1)
    assert buffer.trespass() is None


def test_sets_hold_the_inputs_and_exceed_the_cache_twice() -> None:
    inputs = [np.arange(1000, dtype=np.float32), np.arange(70, dtype=np.float64)]
    sets = RotatingSets(inputs, [500], cache_bytes=100_000, limit_bytes=10**9)
    assert sets.bytes > 200_000 and sets.arg_count == 3
    shapes = [((1000,), np.float32), ((10, 7), np.float64), ((125,), np.float32)]
    starts = set()
    for first, second, out in sets.arrays(shapes):
        assert (first == inputs[0]).all() and (second.ravel() == inputs[1]).all()
        starts |= {address(first), address(second), address(out)}
    assert len(starts) == 3 * sets.count and all(start % ALIGN == 0 for start in starts)


@pytest.mark.parametrize(("limit", "count"), [(0, 1), (3_000_000, 2), (10**9, 3)])
def test_sets_keep_to_their_limit(limit: int, count: int) -> None:
    inputs = [np.zeros(300_000, dtype=np.float32)]
    sets = RotatingSets(inputs, [16], cache_bytes=10**6, limit_bytes=limit)
    assert sets.count == count


def test_small_operands_get_a_bounded_number_of_sets() -> None:
    sets = RotatingSets([np.zeros(4, dtype=np.float32)], [16], 10**9, 10**9)
    assert sets.count == 4096
