"""The tool that measures generation: rows, exit status, refusals, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from thunder_cg.report.rules import RESULTS
from thunder_cg.tools.generation.__main__ import main
from thunder_cg.tools.generation.measure import EAGER, OURS, REDUCE_OVERHEAD, THUNDER, GenerationRow
from thunder_cg.tools.generation.models import MODELS
from thunder_cg.tools.generation.results import GenerationResults, differ, markdown
from thunder_cg.tools.generation.run import run
from thunder_cg.tools.suite.catalogue import CatalogueSettings

CPU = torch.device("cpu")


def row(variant: str, **values: object) -> GenerationRow:
    made = GenerationRow("Net", "tests", variant, 1)
    for name, value in values.items():
        setattr(made, name, value)
    return made


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_workers")
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "generation.json"
    variants = (EAGER, THUNDER, REDUCE_OVERHEAD, OURS)
    settings = CatalogueSettings(CPU, "generation_models", jobs=4, timeout=100.0, json=file)
    assert run(settings, variants) == 0
    printed = capsys.readouterr().out
    assert "| Counter | ran | ran | -- | ran | ran | -- | -- | yes |" in printed
    assert "Broken, thunder_cg: RuntimeError: no such thing" in printed
    rows = GenerationResults.read(file).rows
    assert [each.variant for each in rows if each.model == "Counter"] == [*variants]
    digests = {each.digest for each in rows if each.model == "Counter"}
    assert not any(each.eager for each in rows)
    assert len(digests) == 1 and digests != {""}, "all variants generate the same tokens"
    assert json.loads(file.read_text())["environment"]["torch"] == torch.__version__


def test_other_tokens_are_an_exit_status() -> None:
    same = [row(THUNDER, digest="a", tokens_per_second=50.0), row(OURS, digest="a", tokens_per_second=200.0)]
    assert differ(same) == [] and differ([*same[:1], row(OURS, digest="b")]) == ["Net"]
    assert differ([*same[:1], row(OURS, failure="too slow")]) == []


def test_table() -> None:
    rows = [
        row(EAGER, tokens_per_second=60.4),
        row(THUNDER, digest="a", tokens_per_second=50.0),
        row(REDUCE_OVERHEAD, failure="RuntimeError: no"),
        row(OURS, digest="b", tokens_per_second=1234.5, launches=2.2, eager="3 x too large"),
    ]
    lines = markdown(rows, {"device": "a GPU", "torch": "2.11", "date": "today"}).splitlines()
    assert lines[2] == "| Net | 60 | 50 | -- | fails | 1,234 | -- | 2 | no |"
    assert "Net, torch.compile, reduce-overhead: RuntimeError: no" in lines
    assert "Net, thunder_cg, without graphs: 3 x too large" in lines
    assert lines[-1] == "a GPU, torch 2.11, today; greedy, random weights."


def test_page_has_the_numbers_of_the_result_file() -> None:
    page = (RESULTS / "RESULTS.md").read_text(encoding="utf-8")
    results = GenerationResults.read(RESULTS / "generation-h200.json")
    table = markdown(results.rows, results.environment).splitlines()
    assert all(line in page for line in table if line.startswith("| ") and "---" not in line)
    assert {each.model for each in results.rows} <= set(MODELS)
    assert not differ(results.rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nothing"], "--only nothing: no model has that in its name; there are Llama 3.2 1B, batch 1"),
        (["--variants", "fast"], "--variants fast: give some of 'eager', 'thunder'"),
        (["--json", str(RESULTS / "generation-h200.json")], "was measured with device NVIDIA H200"),
    ],
)
def test_command_refuses_at_once(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--device", "cpu", *words])
    assert left.value.code == 2
    assert said in capsys.readouterr().err
