"""What is said of a fact that differs has both values."""

from __future__ import annotations

from enum import Enum

import pytest
import torch
from torch import nn

from thunder_cg.compat.guards import attribute_writes_are_reported
from thunder_cg.step.collector import facts_of
from thunder_cg.step.facts import Same, difference, fact_of


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (fact_of(1), fact_of(2), "x changed from 1 to 2"),
        (fact_of(1.5), fact_of(float("nan")), "x changed from 1.5 to nan"),
        (fact_of(0.0), fact_of(-0.0), "x changed from 0.0 to -0.0"),
        (fact_of("a"), fact_of(None), "x changed from 'a' to None"),
        ((True, torch.half), (False, torch.half), "x changed from (True, torch.float16) to (False, torch.float16)"),
        (fact_of([]), Same(torch.zeros(2)), "x changed from a list to a tensor (2,) of float32"),
        (fact_of(1), fact_of(1), None),
    ],
)
def test_what_is_shown_of_a_fact(before, after, said):
    assert difference({"x": before}, {"x": after}) == said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"len(x)": 0}, {"type(x['loss'])": list}, "what x holds changed"),
        ({"x": fact_of(None)}, {"len(x)": 1, "x['n']": fact_of(1)}, "x changed from None to something else"),
        ({"x['n']": fact_of(1)}, {"xs": fact_of(1)}, "x['n'] was 1 and is gone"),
    ],
    ids=["an item of it only grows", "a dictionary", "gone"],
)
def test_what_is_said_of_a_fact_that_there_is_no_more(before, after, said):
    assert difference(before, after) == said


def test_facts_of_an_enumeration_are_collected_when_something_changes():
    """As an argument it is looked at in each call, which takes longer than a replay."""
    if not attribute_writes_are_reported():
        pytest.skip("Python 3.13.0, where all is compared")
    mode = Enum("Mode", "ONE TWO", module=__name__).ONE
    mode.scale = 1.0
    facts = facts_of(mode)
    assert facts_of(mode) is facts
    mode.scale = 2.0
    changed = facts_of(mode)
    assert changed != facts and facts_of(mode) is changed
    type(mode).LIMIT = 3
    assert facts_of(mode) != changed


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
def test_what_is_shown_of_autocast(step_twins):
    model = nn.Linear(3, 3).to(step_twins.device)
    kind = step_twins.device

    def turns(x):
        torch.set_autocast_enabled(kind, not torch.is_autocast_enabled(kind))
        return model(x)

    x = torch.ones(2, 3, device=kind)
    with torch.autocast(kind, torch.bfloat16):
        step = step_twins.graphed(turns)
        step(x)
    on, off = "on with torch.bfloat16", "off with torch.bfloat16"
    assert f"autocast for {kind} changed from {on} to {off}, in the step" in str([*step.in_python])
    step = step_twins.graphed(lambda x: model(x))
    step(x)
    with torch.autocast(kind, torch.bfloat16):
        step(x)
    assert f"noted, since autocast for {kind} changed from " in str([*step.in_python])
    assert f" to {on}" in str([*step.in_python])
