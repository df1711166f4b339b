"""The zoo: small models go through all of it, what does not run says why, and the README shows what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import thunder
import torch
from suite_models import MODELS, Net, entry

from thunder_cg import __main__ as command_line
from thunder_cg import cudagraph_transform, zoo
from thunder_cg.tools.suite import models, row
from thunder_cg.tools.suite.jobs import Job, measure_all
from thunder_cg.tools.suite.results import Results, environment, results_for
from thunder_cg.tools.suite.row import (
    BREAK,
    EAGER,
    FORWARD,
    FX,
    INDUCTOR,
    JIT,
    NOT_REPLAYED,
    TRAINING,
    Outside,
    Row,
    measure,
)
from thunder_cg.tools.suite.table import BEGIN, END, line, markdown, rewrite

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "thunder_cg" / "results" / "zoo.json"

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def measured(name: str, mode: str = FORWARD) -> Row:
    return measure(MODELS[name], mode, CPU, calls=1)


def outside(found: Row) -> set[tuple[str, str]]:
    return {(part.kind, part.what) for part in found.outside}


@pytest.fixture
def operator() -> Iterator[Callable[..., Any]]:
    """Registers an operator of the user's own that adds what `number()` says."""
    executor = thunder.extend.OperatorExecutor("zoo")
    thunder.extend.register_executor(executor)
    thunder.extend.add_default_executor(executor)
    meta = thunder.core.proxies.TensorProxy
    yield lambda name, number: executor.register_operator(name, fn=lambda x: x + number(), meta=lambda x: meta(like=x))
    thunder.extend.remove_default_executor(executor)
    thunder.extend.deregister_executor(executor)


# ------------------------------------------------------------------------------------------------------------ measuring


def test_a_model_in_one_region() -> None:
    found = measured("Net")
    assert (found.path, found.not_jit, found.failure) == (JIT, "", "")
    assert (found.agrees, found.regions, found.replayed, found.graphs, found.outside) == ("yes", 1, 1, 1, [])
    assert 3 <= found.captured == found.ops
    assert found.thunder_us == found.captured_us == 0.0, "a CPU's times say nothing"


def test_training_counts_both_ways() -> None:
    found = measured("Net", TRAINING)
    assert (found.agrees, found.regions, found.replayed, found.failure) == ("yes", 2, 2, "")
    assert found.captured > measured("Net").captured


def test_an_eager_op_is_counted_and_named() -> None:
    found = measured("Item")
    assert found.captured < found.ops and found.regions >= 1 and found.agrees == "yes"
    assert (EAGER, "Tensor.item") in outside(found)
    (item,) = (part for part in found.outside if part.what == "Tensor.item")
    assert item.count == 1 and item.why == "depends on what tensors hold"


def test_what_dynamo_breaks_is_counted() -> None:
    found = measured("Branch")
    assert found.path == FX and found.not_jit and found.agrees == "yes"
    assert {part.kind for part in found.outside} == {BREAK, EAGER}  # the product alone is too small a region
    assert found.graphs == 2


def test_what_thunderfx_leaves_to_inductor_is_an_op_that_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: graph)  # the real one needs a C++ compiler
    found = measured("Sinc")
    assert found.path == FX and (INDUCTOR, "sinc") in outside(found)
    assert found.ops > found.captured and found.agrees == "yes"


def test_what_thunder_cannot_do_says_so_for_both_its_ways() -> None:
    found = measured("Broken")
    assert found.failure.startswith("ThunderError: uncaptured, thunder.jit: RuntimeError: no such thing; thunderfx: ")
    assert found.agrees == "" and found.ops == 0


def test_a_region_that_does_not_replay_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row, "STEPS", 1)  # the first call only warms up
    found = measured("Net")
    assert (found.regions, found.replayed) == (1, 0)
    assert outside(found) == {(NOT_REPLAYED, "region")}


def test_other_numbers_are_found(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that reads the host is frozen when it is captured by force."""
    seeded = operator("add_seed", torch.initial_seed)

    class Seeded(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(seeded(x))

    monkeypatch.setattr(row, "cudagraph_transform", partial(cudagraph_transform, allow=["add_seed"]))
    found = measure(entry(Seeded), FORWARD, CPU, calls=1)
    assert found.agrees.startswith("no: output 0 of step 2, by up to ")


def test_numbers_that_vary_without_graphs_are_not_held_against_them(operator: Any) -> None:
    numbers = count()
    counted = operator("add_count", lambda: next(numbers))

    class Counted(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(counted(x))

    found = measure(entry(Counted), FORWARD, CPU, calls=1)
    assert found.agrees.startswith("Thunder varies: output 0 of step 0, by up to ")


def test_where_thunder_varies_kernels_that_do_not_tell(operator: Any) -> None:
    numbers = count()
    deterministic = torch.are_deterministic_algorithms_enabled
    noisy = operator("add_noise", lambda: 0 if deterministic() else next(numbers))

    class Noisy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(noisy(x))

    found = measure(entry(Noisy), FORWARD, CPU, calls=1)
    assert found.agrees == "yes: with deterministic algorithms everywhere"
    assert not deterministic()


def test_all_that_a_step_leaves_is_compared() -> None:
    side = row.Side(MODELS["Net"], TRAINING, CPU, JIT, [])
    names = {*side.results(next(row.batches(MODELS["Net"], TRAINING, CPU)), 0)}
    assert {"output 0", "loss", "gradient of first.weight", "buffer norm.running_var"} < names


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": torch.tensor([1.0, -0.0])}, "a of step 3, by up to 0"),
        ({"a": torch.ones(3)}, "a of step 3 is torch.float32 (3,), not torch.float32 (2,)"),
        ({"a": torch.tensor([1.0, 0.0]), "b": torch.ones(1)}, "b of step 3 is only there with graphs"),
        ({}, "a of step 3 is only there without graphs"),
        ({"a": torch.tensor([1.0, 0.0])}, ""),
    ],
)
def test_the_first_difference_is_named(found: dict[str, torch.Tensor], said: str) -> None:
    assert row._first_difference({"a": torch.tensor([1.0, 0.0])}, found, 3) == said


def test_batches_are_fresh_and_the_same_for_both_sides() -> None:
    one, other = (row.batches(MODELS["Net"], FORWARD, CPU) for _ in range(2))
    first, second = next(one).args[0], next(one).args[0]
    assert torch.equal(first, next(other).args[0]) and not torch.equal(first, second)


@pytest.mark.parametrize(
    ("said", "understood"),
    [
        (
            "node with name: x and target: <built-in method addmm of type object at 0x7f> only has a fallback.",
            ("addmm", "it only has a fallback"),
        ),
        ("node with name: r_1 and target: new_ones only has a fallback.", ("new_ones", "it only has a fallback")),
        ("node with name: o and target: my.op didn't have any mapping.", ("my.op", "it didn't have any mapping")),
        (
            "Failed while running meta for node with name: x and target: <function interpolate at 0x7f>: no corners",
            ("interpolate", "Failed while running meta for it: no corners"),
        ),
        ("something else", ("a part of the graph", "something else")),
    ],
)
def test_thunders_words_are_understood(said: str, understood: tuple[str, str]) -> None:
    assert row._target(said) == understood


@pytest.mark.parametrize("mode", [FORWARD, TRAINING])
@pytest.mark.parametrize("name", ["BERT base", "ViT B/16, torchvision", "EfficientNet B0"])
def test_models_of_other_packages(name: str, mode: str) -> None:
    model = models.MODELS[name]
    pytest.importorskip(model.package)
    found = measure(model, mode, CPU, calls=1)
    if name.startswith("ViT") and mode == TRAINING and found.failure.startswith("ThunderError"):
        pytest.skip(found.failure)  # with some versions of torchvision
    assert (found.failure, found.agrees) == ("", "yes")
    assert found.replayed == found.regions > 0


# ------------------------------------------------------------------------------------------------------- the processes


def jobs(*names: str, mode: str = FORWARD, device: torch.device = CPU) -> list[Job]:
    return [Job("suite_models", name, "tests", mode, device, 2) for name in names]


def test_a_process_that_crashes_or_hangs_costs_its_row() -> None:
    rows = {found.model: found for found in measure_all(jobs("Crash", "Net"), 2, 300.0)}
    assert rows["Crash"].failure == "the process ended with status 3, in uncaptured thunder.jit: out of luck"
    assert rows["Net"] == measured("Net")
    (hung,) = measure_all(jobs("Hang"), 1, 3.0)
    assert hung == Row("Hang", "tests", FORWARD, failure="no result within 3 s, in uncaptured thunder.jit")


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("mode", [FORWARD, TRAINING])
def test_rows_are_timed_on_a_gpu_after_all_are_made(mode: str) -> None:
    names = ["Net", "Broken", "Item"]
    rows = [*measure_all(jobs(*names, mode=mode, device=torch.device("cuda")), 3, 300.0)]
    assert {found.model for found in rows[:3]} == {*names}
    assert {found.model for found in rows[3:]} == {"Net", "Item"}
    for found in rows[3:]:
        assert found.failure == "" and found.agrees == "yes" and found.thunder_us > 0 and found.captured_us > 0


def test_the_zoo_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "zoo.json"
    settings = zoo.Settings(CPU, only="net", jobs=2, json=file, catalogue="suite_models")
    assert zoo.run(settings) == 0
    printed = capsys.readouterr().out
    assert "Net, training, thunder.jit: " in printed and "| Net (jit) |" in printed
    content = json.loads(file.read_text())
    assert [(each["model"], each["mode"]) for each in content["rows"]] == [("Net", FORWARD), ("Net", TRAINING)]
    assert content["environment"]["torch"] == torch.__version__ and content["environment"]["date"]


def test_a_difference_is_an_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Row("Net", "tests", FORWARD, agrees="no: output 0 of step 2, by up to 1")
    monkeypatch.setattr(zoo, "measure_all", lambda jobs, at_once, seconds: iter([wrong]))
    assert zoo.run(zoo.Settings(CPU, only="Net", catalogue="suite_models")) == 1


# --------------------------------------------------------------------------------------------------- results and table

SAMPLE = [
    Row("A", "p", FORWARD, JIT, "", 100, 100, 1, 1, 1, [], "yes", 2000.0, 500.0),
    Row("A", "p", TRAINING, JIT, "", 1300, 1299, 1, 3, 3, [Outside(EAGER, "Tensor.item", 1, "it reads")], "yes"),
    Row(
        *("B", "p", FORWARD, FX, "no", 20, 10, 2, 2, 1),
        [Outside(INDUCTOR, "torch.addmm", 8, "a | b"), Outside(INDUCTOR, "diff", 1, "c")],
        "Thunder varies: loss of step 1",
    ),
    Row("B", "p", TRAINING, failure="TypeError: no"),
]
ENVIRONMENT = {"device": "a GPU", "driver": "1.2", "backend": "cuda", "torch": "2.11.0", "date": "2026-11-21"}


def test_table() -> None:
    lines = markdown(SAMPLE, ENVIRONMENT).splitlines()
    assert lines[2] == (
        "| A (jit) | 100 of 100 ops, 1 region, 2.00 → **0.50** ms | yes | 1,299 of 1,300 ops, 3 regions | yes "
        "| eager (it reads): `item` |"
    )
    assert lines[3] == (
        "| B (thunderfx) | 10 of 20 ops, 2 regions | Thunder varies | fails | -- | thunderfx leaves to Inductor: "
        "`addmm` ×8, `diff`; training fails: TypeError: no; forward: Thunder varies: loss of step 1 |"
    )
    caption = "a GPU, driver 1.2, torch 2.11.0, 2026-11-21; bfloat16, real sizes."
    assert lines[-1] == f"{caption} What has no times here was compared, and not timed."
    timed = [row for row in SAMPLE if row.captured_us]
    assert markdown(timed, ENVIRONMENT).splitlines()[-1] == caption


def test_what_fails_alike_is_said_once() -> None:
    rows = [Row("C", "p", mode, failure="TypeError: <function f at 0x7f2a>") for mode in (FORWARD, TRAINING)]
    (cells,) = [text for text in markdown(rows, ENVIRONMENT).splitlines() if text.startswith("| C")]
    assert cells.endswith("| forward and training fail: TypeError: <function f> |")


def test_lines() -> None:
    assert line(SAMPLE[0]) == "A, forward, thunder.jit: 100 of 100 ops, 1 region; 2,000 -> 500 us; same bits: yes"
    assert line(SAMPLE[3]) == "B, training: TypeError: no"


def test_results_are_read_as_they_were_written_and_added_to(tmp_path: Path) -> None:
    file = tmp_path / "new" / "zoo.json"
    Results(environment(CPU), [*SAMPLE]).write(file)
    found = results_for(file, CPU)
    assert found.rows == SAMPLE
    again = replace(SAMPLE[1], ops=1)
    found.add(again, ["A", "B"])
    assert [each.ops for each in found.rows] == [100, 1, 20, 0]


def test_results_from_elsewhere_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "zoo.json"
    Results(ENVIRONMENT).write(file)
    with pytest.raises(ValueError, match=r"was measured with device a GPU, here it is .*; name another file"):
        results_for(file, CPU)
    file.write_text('{"rows": 1}')
    with pytest.raises(ValueError, match="does not hold results of the zoo"):
        results_for(file, CPU)


def test_readme_shows_the_table_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    results = Results.read(RESULTS)
    assert rewrite(readme, markdown(results.rows, results.environment)) == readme, (
        "run: python -m thunder_cg zoo --json thunder_cg/tools/results/zoo.json --table README.md"
    )
    assert {found.model for found in results.rows} == {*models.MODELS}


# --------------------------------------------------------------------------------------------------------- command line


def test_command_lists_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["zoo", "--device", "cpu", "--list", "--only", "vit"]) == 0
    assert capsys.readouterr().out.splitlines() == ["ViT B/16, Hugging Face", "ViT B/16, torchvision"]


def test_command_rewrites_a_table(tmp_path: Path) -> None:
    results, text = tmp_path / "zoo.json", tmp_path / "README.md"
    Results(ENVIRONMENT, SAMPLE).write(results)
    text.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    assert command_line.main(["zoo", "--device", "cpu", "--json", str(results), "--table", str(text)]) == 0
    assert text.read_text(encoding="utf-8") == f"before\n{BEGIN}\n{markdown(SAMPLE, ENVIRONMENT)}\n{END}\nafter\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nothing"], "--only nothing: no model has that in its name; --list shows all"),
        (["--table", "README.md"], "--table needs --json FILE, the rows that it is to show"),
        (["--table", "README.md", "--json", "none.json"], "--json none.json: there is no such file"),
        (["--table", "pyproject.toml", "--json", str(RESULTS)], f"pyproject.toml: it has no lines {BEGIN} and {END}"),
        (["--jobs", "0"], "argument --jobs: 0: give 1 or more"),
    ],
)
def test_command_refuses_at_once(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as left:
        command_line.main(["zoo", "--device", "cpu", *words])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_packages_of_the_models_are_an_extra() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = text.partition("\nzoo = [")[2].partition("]")[0]
    assert {package.strip('" \n') for package in extra.split(",") if package.strip()} == {
        model.package for model in models.MODELS.values()
    }
