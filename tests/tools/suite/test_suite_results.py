"""The result file of the model suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from samples import SAMPLE

from thunder_cg.tools.results import environment
from thunder_cg.tools.suite.results import MODES, PACKAGES, SuiteResults

CPU = torch.device("cpu")


def test_results_are_read_as_they_were_written_and_added_to(tmp_path: Path) -> None:
    file = tmp_path / "new" / "suite.json"
    SuiteResults(environment(CPU, PACKAGES), [*SAMPLE]).write(file)
    found = SuiteResults.read_or_new(file, environment(CPU, PACKAGES))
    assert found.rows == SAMPLE
    again = replace(SAMPLE[1], ops=1)
    found.add([again], ["A", "B"], MODES)
    assert [each.ops for each in found.rows] == [100, 1, 20, 0]
