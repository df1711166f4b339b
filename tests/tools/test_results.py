"""Result files: the environment, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from thunder_cg.tools.bench.results import BenchmarkResults
from thunder_cg.tools.operators.results import OperatorResults
from thunder_cg.tools.results import MeasuredResults, environment
from thunder_cg.tools.suite.results import SuiteResults

ELSEWHERE = {"device": "a GPU", "driver": "1.2", "backend": "cuda", "torch": "2.11.0", "date": "2026-11-21"}
HERE = {**ELSEWHERE, "date": "2026-11-23"}
CLASSES = [BenchmarkResults, OperatorResults, SuiteResults]


@dataclass(slots=True)
class Numbers(MeasuredResults):
    numbers: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"environment": self.environment, "numbers": self.numbers}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Numbers:
        return cls(content["environment"], content["numbers"])


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    Numbers(ELSEWHERE, [1, 2]).write(file)
    assert Numbers.read(file) == Numbers(ELSEWHERE, [1, 2])
    assert Numbers.read_or_new(file, HERE) == Numbers(HERE, [1, 2]), "the date may differ"
    assert Numbers.read_or_new(tmp_path / "none", HERE) == Numbers.read_or_new(None, HERE) == Numbers(HERE)


@pytest.mark.parametrize("results", CLASSES)
def test_results_from_elsewhere_are_refused(results: type[MeasuredResults], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    results(ELSEWHERE).write(file)
    with pytest.raises(ValueError, match=r"was measured with device a GPU, here it is .*; name another file"):
        results.read_or_new(file, environment(torch.device("cpu")))
    file.write_text('{"rows": 1}')
    with pytest.raises(ValueError, match=f"does not hold {results.__name__} .*; name another file"):
        results.read(file)


def test_environment() -> None:
    here = environment(torch.device("cpu"), ["pytest", "no-such-package"])
    assert here["torch"] == torch.__version__ and here["backend"] == "tape" and here["date"]
    assert here["pytest"] == pytest.__version__ and "no-such-package" not in here


def test_no_file_of_somebody_else_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("# A project")
    for refused in (lambda: Numbers.check_writable(file), lambda: Numbers(HERE, [1]).write(file)):
        with pytest.raises(ValueError, match=r"README.md does not hold Numbers .*name another file"):
            refused()
    assert file.read_text() == "# A project"
    Numbers.check_writable(None)
