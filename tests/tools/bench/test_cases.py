"""The cases have names of their own, and the scaling series grow in the unit that they name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thunder_cg.tools.bench.cases import SCALING, cases
from thunder_cg.tools.bench.variants import FLOOR, OURS, variants


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_of_cases_differ(device: str) -> None:
    for quick in (False, True):
        names = [case.name for case in cases(torch.device(device), quick)]
        assert names and len({*names}) == len(names)
    assert variants(torch.device(device))[-1] == (FLOOR if device == "cuda" else OURS)


@pytest.mark.parametrize("series", SCALING, ids=lambda series: series.unit)
def test_scaling_series_grow_what_they_say(series: Any) -> None:
    for size in (1, 7):
        case = series.case(size)
        model, inputs = case.model(), case.inputs()
        assert model(*inputs).isfinite().all()
        counted = {"parameter": len([*model.parameters()]), "input": len(inputs), "layer": getattr(model, "times", 0)}
        assert counted[series.unit] == size
