"""Which registered layers a flat buffer holds, from sizes alone."""

from __future__ import annotations

import math

from thinwire.integrations.group_contents import LayerCursor

LAYERS = [("embed", (64, 8)), ("a", (8, 8)), ("a.bias", (8,)), ("b", (16, 8)), ("b.bias", (16,)), ("norm", (16,))]


def size(*names: str) -> int:
    return sum(math.prod(shape) for name, shape in LAYERS if name in names)


def found(walk: LayerCursor, numel: int) -> list[str] | None:
    run = walk.find(numel)
    return None if run is None else [name for name, _ in run]


ALL = [name for name, _ in LAYERS]


def test_the_first_pass_is_one_buffer_in_registered_order_and_later_ones_walk_backwards() -> None:
    walk = LayerCursor(LAYERS)
    assert found(walk, size(*ALL)) == ALL
    for _ in range(3):
        assert found(walk, size("norm", "b.bias", "b")) == ["norm", "b.bias", "b"]
        assert found(walk, size("a", "a.bias")) == ["a.bias", "a"]
        assert found(walk, size("embed")) == ["embed"]


def test_other_sizes_are_not_found_and_leave_the_cursor_where_it_is() -> None:
    walk = LayerCursor(LAYERS)
    assert found(walk, size("norm", "b.bias")) == ["norm", "b.bias"]
    for numel in (1, 7, 127, 10_000):
        assert found(walk, numel) is None
    assert found(walk, size("b")) == ["b"]


def test_a_pass_that_broke_off_is_followed_by_one_from_the_start() -> None:
    walk = LayerCursor(LAYERS)
    assert found(walk, size("norm", "b.bias", "b")) == ["norm", "b.bias", "b"]
    assert found(walk, size("norm", "b.bias", "b")) == ["norm", "b.bias", "b"]
    assert found(walk, size("a.bias", "a")) == ["a.bias", "a"]


def test_layers_without_elements_are_no_hindrance() -> None:
    walk = LayerCursor([("none", (0, 4)), *LAYERS, ("nothing", (0,))])
    assert found(walk, size(*ALL)) == ALL
    assert found(walk, size("norm")) == ["norm"]
