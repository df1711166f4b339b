"""The model of the caching allocator's segments, and the first segment that is chosen with it."""

from __future__ import annotations

import pytest

from thunder_cg.analysis.segments import SMALL, Event, Segments, first_segment

MB = 2**20


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([("a", SMALL)], 0),
        ([("a", SMALL + 1)], 20),
        ([("a", 9 * MB), ("b", 9 * MB), ("c", 9 * MB)], 40),
        ([("a", 10 * MB), ("b", 11 * MB + 1)], 10 + 12),
        ([("a", 30 * MB), ("a", 0), ("b", 30 * MB)], 30),
        ([("a", 30 * MB), ("a", 0), ("b", 31 * MB)], 30 + 32),
        ([("a", 30 * MB), ("a", 0), ("b", 16 * MB), ("c", 14 * MB)], 30),
        # The smallest block that fits: 12 MiB of the first one would do as well.
        ([("a", 30 * MB), ("b", 12 * MB), ("a", 0), ("b", 0), ("c", 11 * MB), ("d", 30 * MB)], 30 + 12),
    ],
)
def test_segments(events: list[Event], expected: int) -> None:
    assert Segments().play(events).nbytes == expected * MB


def test_neighbours_are_joined() -> None:
    parts = [(name, 10 * MB) for name in "abc"]
    freed = [(name, 0) for name in "acb"]
    assert Segments(30 * MB).play([*parts, *freed, ("all", 30 * MB)]).nbytes == 30 * MB
    assert Segments(30 * MB).play([*parts, *freed[:2], ("two", 20 * MB)]).nbytes == 50 * MB


def test_a_first_segment_where_each_tensor_is_a_little_larger() -> None:
    """Each one is freed when the next is there, so two segments of the last size would do, and each gets its own."""
    events: list[Event] = []
    for i in range(20):
        events += [(str(i), (40 + 2 * i) * MB), (str(i - 1), 0)]
    without = Segments().play(events).nbytes
    size = first_segment(events)
    assert (78 + 76) * MB <= Segments(size).play(events).nbytes < 0.5 * without


def test_a_first_segment_has_no_room_for_one_tensor_that_is_much_larger() -> None:
    """What a fusion allocates inside would split it, and the large tensor would need a segment besides."""
    names = [f"{layer}.{i}" for layer in range(8) for i in range(4)]
    events: list[Event] = [(name, size * MB) for name, size in zip(names, (6, 18, 6, 25) * 8)]
    events += [("logits", 300 * MB), ("logits", 0)]
    for name in reversed(names):
        events += [(f"gradient {name}", 5 * MB), (name, 0)]
    assert Segments(740 * MB).play(events).nbytes < 0.97 * Segments().play(events).nbytes  # if nothing else were there
    inside = [
        each
        for name, size in events
        for each in ([("inside", size), (name, size), ("inside", 0)] if size else [(name, 0)])
    ]
    assert Segments(740 * MB).play(inside).nbytes > 1.1 * Segments().play(inside).nbytes
    assert Segments(first_segment(events)).play(inside).nbytes <= Segments().play(inside).nbytes


@pytest.mark.parametrize(("large", "expected"), [(2, 10), (3, 12), (6, 18)])
def test_a_first_segment_that_is_smaller_than_the_allocators_own(large: int, expected: int) -> None:
    """As of a function between graph breaks. What a kernel allocates inside may fit as well."""
    assert first_segment([("a", large * MB), ("b", large * MB), ("c", large * MB)]) == expected * MB


def test_no_first_segment() -> None:
    """Where it saves nothing."""
    assert first_segment([]) == 0
    assert first_segment([("a", SMALL), ("b", SMALL)]) == 0
    assert first_segment([("a", 64 * MB), ("a", 0), ("b", 64 * MB)]) == 0
