"""The tool that measures generation: rows, exit status, refusals, and its table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from thunder_cg.report.rules import RESULTS
from thunder_cg.tools.bench.variants import THUNDER_OWN
from thunder_cg.tools.generation.__main__ import main
from thunder_cg.tools.generation.measure import (
    EAGER,
    OURS,
    REDUCE_OVERHEAD,
    ROUNDS,
    THUNDER,
    VARIANTS,
    WARM_UPS,
    GenerationRow,
    measure,
)
from thunder_cg.tools.generation.models import LITGPT, MODELS, GeneratingModel
from thunder_cg.tools.generation.results import GenerationResults, differ, markdown
from thunder_cg.tools.generation.run import run, together
from thunder_cg.tools.suite.catalogue import CatalogueSettings, RowTask, measure_all
from thunder_cg.tools.suite.measure import make_model
from thunder_cg.tools.workers import Supervisor

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


def test_variants_take_turns() -> None:
    """All generate from the same prompts, and each begins a round."""
    seen: list[tuple[str, list[int]]] = []

    def generate(variant: str, prompt: Tensor, new: int) -> Tensor:
        seen.append((variant, prompt.tolist()))
        return prompt.repeat(1, 2)

    at_work: list[str] = []
    entry = GeneratingModel("Net", LITGPT, lambda tiny: nn.Identity(), lambda *_: at_work[-1], generate)
    turns: list[int] = []
    rows = measure(entry, VARIANTS, CPU, at_work.append, lambda: turns.append(len(seen)))
    assert [each.variant for each in rows] == [*VARIANTS]
    assert turns == [WARM_UPS * len(VARIANTS)], "all are prepared before the first is timed"
    rounds = [seen[i : i + len(VARIANTS)] for i in range(turns[0], len(seen), len(VARIANTS))]
    assert len(rounds) == ROUNDS and {first for (first, _), *_ in rounds} == {*VARIANTS}
    for turn in rounds:
        assert {variant for variant, _ in turn} == {*VARIANTS}
        assert all(prompt == turn[0][1] for _, prompt in turn)
    assert len({each.digest for each in rows}) == 1
    assert at_work[len(VARIANTS) : -len(VARIANTS)] == [variant for turn in rounds for variant, _ in turn]


def test_thunders_own_graphs_have_a_process_of_their_own() -> None:
    assert together(VARIANTS) == [(THUNDER_OWN,), tuple(name for name in VARIANTS if name != THUNDER_OWN)]
    assert together([OURS]) == [(OURS,)] and together([THUNDER_OWN]) == [(THUNDER_OWN,)]


def test_models_of_litgpt_generate_greedily() -> None:
    """With its default of `top_p`, LitGPT draws tokens at a temperature of 0, too."""
    pytest.importorskip("litgpt")
    entry = MODELS["pythia-160m, LitGPT"]
    model, prompt = make_model(entry.make, CPU, 0), torch.tensor([[3, 4]])
    with torch.no_grad():
        logits = model(prompt)
    assert entry.generate(model, prompt, 1).tolist() == [[3, 4, int(logits[0, -1].argmax())]]


def work(task: RowTask, supervisor: Supervisor) -> None:
    for variant in task.ways:
        supervisor.report(variant)
        if variant == THUNDER_OWN:
            raise RuntimeError("a capture fails")
    supervisor.report(task.ways[0])
    if task.ways[0] == REDUCE_OVERHEAD:
        os._exit(3)
    supervisor.send_result([row(variant, digest=str(os.getpid())) for variant in task.ways])


@pytest.mark.usefixtures("forked_workers")
def test_a_variant_that_fails_leaves_the_others() -> None:
    """They are measured together, in a process in which none has failed."""
    task = RowTask("no catalogue", "Net", (REDUCE_OVERHEAD, THUNDER_OWN, EAGER, OURS), CPU, 100.0)
    rows = [*measure_all([task], work, lambda task, variant: row(variant), 1)]
    assert [(each.variant, each.failure) for each in rows] == [
        (THUNDER_OWN, "RuntimeError: a capture fails"),
        (REDUCE_OVERHEAD, f"the process ended with status 3, {REDUCE_OVERHEAD}"),
        (EAGER, ""),
        (OURS, ""),
    ]
    assert rows[2].digest == rows[3].digest != ""


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
