"""Rows are measured in processes of their own; the command runs, lists, and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from thunder_cg.tools.suite import catalogue
from thunder_cg.tools.suite.__main__ import main
from thunder_cg.tools.suite.catalogue import CatalogueSettings, RowTask, measure_all
from thunder_cg.tools.suite.results import FORWARD, TRAINING, SuiteResults, SuiteRow
from thunder_cg.tools.suite.run import no_row, run, work

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def measured(
    *names: str, mode: str = FORWARD, device: torch.device = CPU, timeout: float = 300.0
) -> dict[str, SuiteRow]:
    tasks = [RowTask("suite_models", name, (mode,), device, timeout) for name in names]
    return {row.model: row for row in measure_all(tasks, work, no_row, 3)}


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_workers")
def test_a_process_that_crashes_or_hangs_costs_its_row() -> None:
    rows = measured("Crash", "Hang", timeout=4.0)
    assert rows["Crash"].failure == "the process ended with status 3, in uncaptured thunder.jit: out of luck"
    hang = rows["Hang"]
    assert hang.failure.startswith("no result within 4 s, in uncaptured thunder.jit, in ")  # and where it hangs
    assert hang == SuiteRow("Hang", "tests", FORWARD, failure=hang.failure)


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_workers")
def test_a_row_without_memory_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIED", str(tmp_path / "tried"))
    (found,) = measured("Large").values()
    assert found.agrees == "yes" and found.failure == "" and (tmp_path / "tried").exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.gpu
@pytest.mark.parametrize("mode", [FORWARD, TRAINING])
def test_rows_are_timed_on_a_gpu(mode: str) -> None:
    rows = measured("Net", "Broken", "Item", mode=mode, device=torch.device("cuda"))
    assert rows["Broken"].captured_us == 0
    for found in (rows["Net"], rows["Item"]):
        assert found.captured_us > 0
        assert found.failure == "" and found.agrees == "yes" and found.thunder_us > 0


@pytest.mark.nightly
def test_the_suite_runs(net: SuiteRow, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "suite.json"
    settings = CatalogueSettings(CPU, "suite_models", ("net",), jobs=2, json=file)
    assert run(settings) == 0
    printed = capsys.readouterr().out
    assert "Net, training, thunder.jit: " in printed and "| Net (jit) |" in printed
    content = json.loads(file.read_text())
    assert [(each["model"], each["mode"]) for each in content["rows"]] == [("Net", FORWARD), ("Net", TRAINING)]
    assert content["environment"]["torch"] == torch.__version__ and content["environment"]["date"]
    assert SuiteResults.read(file).rows[0] == net


def test_a_difference_is_an_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = SuiteRow("Net", "tests", FORWARD, agrees="no: output 0 of step 2, by up to 1")
    monkeypatch.setattr(catalogue, "measure_all", lambda tasks, *_: iter([wrong]))
    assert run(CatalogueSettings(CPU, "suite_models", ("Net",))) == 1


def test_command_lists_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--list", "--only", "vit", "dit"]) == 0
    assert capsys.readouterr().out.splitlines() == ["ViT B/16, Hugging Face", "ViT B/16, torchvision", "DiT B/2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nothing"], "--only nothing: no model has that in its name; there are Llama 3.2 1B, 4 layers"),
        (["--jobs", "0"], "argument --jobs: 0: give 1 or more"),
    ],
)
def test_command_refuses_at_once(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as left:
        main(["--device", "cpu", *words])
    assert left.value.code == 2
    assert said in capsys.readouterr().err
