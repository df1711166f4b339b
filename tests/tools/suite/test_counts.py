"""The operator and the reason in a message of thunderfx."""

from __future__ import annotations

import pytest

from thunder_cg.tools.suite.counts import dropped_operator


@pytest.mark.parametrize(
    ("said", "understood"),
    [
        (
            "node with name: x and target: <built-in method addmm of type object at 0x7f> only has a fallback.",
            ("addmm", "it only has a fallback"),
        ),
        ("node with name: r_1 and target: new_ones only has a fallback.", ("new_ones", "it only has a fallback")),
        ("node with name: o and target: my.op didn't have any mapping.", ("my.op", "it didn't have any mapping")),
        (
            "Failed while running meta for node with name: x and target: <function interpolate at 0x7f>: no corners",
            ("interpolate", "Failed while running meta for it: no corners"),
        ),
        ("something else", ("a part of the graph", "something else")),
    ],
)
def test_thunders_words_are_understood(said: str, understood: tuple[str, str]) -> None:
    assert dropped_operator(said) == understood
