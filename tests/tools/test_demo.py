"""The demo: its two runs agree, it shows what was captured, and it notices when they do not agree."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import pytest
import torch

from thunder_cg import __main__ as command_line
from thunder_cg.tools import demo

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


def tiny(device: str = "cpu") -> demo.DemoSettings:
    return demo.DemoSettings(torch.device(device), layers=1, width=16, heads=2, context=16, batch=2, steps=6)


@pytest.fixture
def outcome() -> demo.DemoRun:
    """One that no run made, to be compared with altered copies of itself."""
    losses = tuple(torch.tensor(value) for value in (3.5, 3.25))
    return demo.DemoRun(losses, {"w": torch.zeros(4), "b": torch.ones(2)}, "abc", 1.0, 1.0, None, None)


# ----------------------------------------------------------------------------------------------------------- whole runs


@dataclass(frozen=True)
class WholeRun:
    device: str
    status: int
    printed: str
    progress: str
    runs: list[demo.DemoRun]


@pytest.fixture(scope="module", params=DEVICES)
def whole_run(request: pytest.FixtureRequest) -> WholeRun:
    """One run of the demo, which compiles four functions, for all tests here."""
    train_and_write = demo.train_and_write
    runs: list[demo.DemoRun] = []

    def recorded(*args: Any) -> demo.DemoRun:
        runs.append(train_and_write(*args))
        return runs[-1]

    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(StringIO()) as printed,
        redirect_stderr(StringIO()) as shown,
    ):
        patch.setattr(demo, "train_and_write", recorded)
        status = demo.run(tiny(request.param))
    return WholeRun(request.param, status, printed.getvalue(), shown.getvalue(), runs)


def test_runs_agree_and_are_captured(whole_run: WholeRun) -> None:
    printed = whole_run.printed
    assert whole_run.status == 0
    assert re.search(r"Agreement: 6 losses, \d+ parameters and 13 characters are the same .* bit for bit", printed)
    # regions, captures, replays, eager ops, calls, fallbacks
    assert table(printed) == {
        "training, forward": [1, 1, 5, 0, 6, 0],
        "training, backward": [1, 1, 5, 0, 6, 0],
        "writing, forward": [1, 1, 15, 1, 16, 0],
    }
    assert re.search(r"item at .*demo\.py:\d+: ", printed), "the plan has the eager .item() and its line"


def test_progress_counts_the_steps_of_both_runs(whole_run: WholeRun) -> None:
    """6 steps and 16 characters, twice. The first calls compile, so the stage is shown before them, without a tick."""
    stages = [re.sub(r" \d+:\d\d ", " ", line) for line in whole_run.progress.splitlines()]
    assert [line for line in stages if "/44" in line] == [
        f"{count}/44 {stage}"
        for first, what, how in (
            (0, "training", "without"),
            (6, "writing", "without"),
            (22, "training", "with"),
            (28, "writing", "with"),
        )
        for count, stage in ((first, f"{what} {how} graphs: compiling"), (first + 3, f"{what} {how} graphs"))
    ]


@pytest.mark.nightly
def test_one_wrong_bit_in_a_weight_is_found(
    whole_run: WholeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the run with graphs, and only there, the lowest bit of one weight is flipped."""
    plain, captured = whole_run.runs
    parameters = {name: parameter.clone() for name, parameter in captured.parameters.items()}
    parameters["head.bias"].view(torch.int32)[3] ^= 1
    broken = replace(captured, parameters=parameters)
    monkeypatch.setattr(demo, "train_and_write", lambda *args: broken if args[-1] else plain)
    assert demo.run(tiny(whole_run.device)) == 1
    printed = capsys.readouterr().out
    assert "1 differ with graphs" in printed
    assert re.search(r"parameter head\.bias: 1 of \d+ elements differ, by up to", printed)


def table(printed: str) -> dict[str, list[int]]:
    """The rows of the table of what was captured, by their names."""
    rows = re.findall(r"^  ((?:training|writing), \w+)((?: +[\d,]+){6})$", printed, flags=re.MULTILINE)
    return {name: [int(number.replace(",", "")) for number in numbers.split()] for name, numbers in rows}


# ----------------------------------------------------------------------------------------------------------- comparison


def test_equal_outcomes_have_no_differences(outcome: demo.DemoRun) -> None:
    copies = {name: value.clone() for name, value in outcome.parameters.items()}
    assert demo.differences(outcome, replace(outcome, parameters=copies)) == []


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (
            lambda o: replace(o, losses=(o.losses[0], o.losses[1] + 1)),
            ["loss of step 2: 3.25 without graphs, 4.25 with"],
        ),
        (
            lambda o: replace(o, parameters={**o.parameters, "b": torch.tensor([1.0, 1.5])}),
            ["parameter b: 1 of 2 elements differ, by up to 0.5"],
        ),
        (
            lambda o: replace(o, parameters={**o.parameters, "w": torch.tensor([0.0, -0.0, 0.0, 0.0])}),
            ["parameter w: 1 of 4 elements differ, by up to 0"],
        ),
        (lambda o: replace(o, text="abd"), ["character 3: 'c' without graphs, 'd' with"]),
    ],
    ids=["loss", "parameter", "sign of zero", "character"],
)
def test_each_difference_is_named(
    outcome: demo.DemoRun, alter: Callable[[demo.DemoRun], demo.DemoRun], said: Sequence[str]
) -> None:
    assert demo.differences(outcome, alter(outcome)) == said


def test_many_differences_are_cut_short(outcome: demo.DemoRun) -> None:
    other = replace(outcome, text="x" * 30)
    lines = list(demo._verdict(other, other, demo.differences(replace(outcome, text="y" * 30), other)))
    assert "DISAGREEMENT: of 2 losses, 2 parameters and 30 characters, 30 differ with graphs from without:" in lines
    assert lines[-2:] == ["  ... and 10 more", "This is a bug in thunder_cg; please report it with the output above."]


# ---------------------------------------------------------------------------------------------------- text, environment


def test_text_is_the_source_of_the_package() -> None:
    text = demo.package_source()
    assert "def package_source() -> str:" in text and "class Options:" in text
    assert demo.package_source() == text


def test_corpus_numbers_its_characters() -> None:
    corpus = demo.Corpus.of("hello", torch.device("cpu"))
    assert "".join(corpus.vocabulary[number] for number in corpus.encoded) == "hello"


def test_batches_pair_each_character_with_the_next() -> None:
    settings = tiny()
    corpus = demo.Corpus("", torch.arange(100))
    tokens, targets = corpus.batch(settings, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (settings.batch, settings.context)
    assert torch.equal(targets, tokens + 1)


def test_determinism_is_asked_for_inside_only() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    with demo.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == before


# --------------------------------------------------------------------------------------------------------- command line


def test_status_of_the_demo_is_the_status_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda settings: 1 if settings.device.type == "cpu" else 0)
    assert command_line.main(["demo", "--device", "cpu"]) == 1


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("gpu", "--device gpu: not a device; give cpu, cuda or cuda:N"),
        ("meta", "--device meta: nothing captures there; give cpu, cuda or cuda:N"),
        ("cuda:99", "CUDA devices; try --device cpu"),
    ],
)
def test_wrong_device_is_refused(device: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main(["demo", "--device", device])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_help_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main(["demo", "--help"])
    assert left.value.code == 0
    assert "--device" in capsys.readouterr().out
