"""The command writes what it measured, and continues an interrupted sweep."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from thunder_cg.tools.operators.__main__ import main
from thunder_cg.tools.operators.results import OperatorResults


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[OperatorResults, list[str]]:
    path = tmp_path_factory.mktemp("sweep") / "rules.json"
    command = ["--device", "cpu", "--jobs", "1", "--first", "2", "--only", "mul", "by hand: read *a list"]
    lines = []
    with patch.object(Path, "unlink", lambda parts, **_: lines.extend(parts.read_text().splitlines())):
        assert main([*command, "--json", str(path)]) == 0
    return OperatorResults.read(path), lines


@pytest.mark.nightly
def test_the_command_writes_what_it_measured(swept):
    results, lines = swept
    assert results.environment["backend"] == "tape"
    assert results.cases.keys() == {"mul", "by hand: read by a list"} and len(lines) == 3
    assert results.symbols["torch.mul"]["forward pass"] >= 2 and results.symbols["torch.mul"]["backward pass"] >= 2
    assert results.symbols["torch.__getitem__"].keys() == {"forced fail"}
    assert "lift_fresh" in results.notes["torch.__getitem__ fail"]


@pytest.mark.nightly
def test_an_interrupted_sweep_goes_on(swept, tmp_path, capsys):
    _, lines = swept
    path = tmp_path / "rules.json"
    here, one, other = map(json.loads, lines)
    mul, read = sorted((one, other), key=lambda record: record["task"]["case"], reverse=True)
    mul["symbols"] = {"torch.mul": {"forward pass": 77}}
    written = [*map(json.dumps, (here, mul, read)), '{"task": {"ca']
    path.with_name("rules.json.parts").write_text("\n".join(written))
    only = [record["task"]["case"] for record in (mul, read)]
    assert main(["--device", "cpu", "--first", "2", "--only", *only, "--json", str(path)]) == 0
    assert OperatorResults.read(path).symbols["torch.mul"] == {"forward pass": 77}
    assert [file.name for file in tmp_path.iterdir()] == ["rules.json"], "the next run measures anew"

    here["environment"]["torch"] = "2.9.0"
    path.with_name("rules.json.parts").write_text(json.dumps(here))
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--only", "mul", "--json", str(path)])
    assert "was measured with torch 2.9.0, here it is" in capsys.readouterr().err


def test_a_name_that_no_case_has(capsys):
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--only", "mul", "no such thing"])
    assert "'no such thing': no case has such a name" in capsys.readouterr().err
