"""The command writes what it measured."""

from __future__ import annotations

import pytest

from thunder_cg.tools.operators.__main__ import main
from thunder_cg.tools.operators.results import OperatorResults


@pytest.mark.nightly
def test_the_command_writes_what_it_measured(tmp_path):
    path = tmp_path / "rules.json"
    command = ["--device", "cpu", "--jobs", "1", "--first", "2", "--only", "mul", "by hand: read *a list"]
    assert main([*command, "--json", str(path)]) == 0
    results = OperatorResults.read(path)
    assert results.environment["backend"] == "tape"
    assert results.cases.keys() == {"mul", "by hand: read by a list"}
    assert results.symbols["torch.mul"]["forward pass"] >= 2 and results.symbols["torch.mul"]["backward pass"] >= 2
    assert results.symbols["torch.__getitem__"].keys() == {"forced fail"}
    assert "lift_fresh" in results.notes["torch.__getitem__ fail"]


def test_a_name_that_no_case_has(capsys):
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--only", "mul", "no such thing"])
    assert "'no such thing': no case has such a name" in capsys.readouterr().err
