"""Errors are relative to the largest value; results that cannot be compared raise."""

from __future__ import annotations

import pytest
import torch

from thunder_cg.tools.bench import accuracy
from thunder_cg.tools.bench.accuracy import StepResults


def test_errors_are_relative_to_the_largest_value() -> None:
    exact = StepResults({"a": torch.tensor([100.0, 1.0])}, {"b": torch.tensor([2.0]), "c": torch.tensor([0.0])})
    found = StepResults({"a": torch.tensor([100.0, 2.0])}, {"b": torch.tensor([2.0]), "c": torch.tensor([0.1])})
    assert accuracy.relative_error(found, exact) == pytest.approx(0.05)
    assert accuracy.same(exact, exact) and not accuracy.same(found, exact)


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"a": torch.ones(3)}, r"a has the shape \(3,\), not \(2,\)"),
        ({"z": torch.ones(2)}, "only one of the two has a, z"),
    ],
)
def test_results_that_cannot_be_compared_say_why(outputs: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        accuracy.relative_error(StepResults(outputs, {}), StepResults({"a": torch.ones(2)}, {}))
