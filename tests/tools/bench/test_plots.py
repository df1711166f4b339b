"""What the plots say, and that they can be read."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import torch

from thunder_cg.tools.bench.cases import GPT_TRAINING, MLP, SMALL_GPT, cases
from thunder_cg.tools.bench.measure import BenchmarkRow
from thunder_cg.tools.bench.plots import (
    COLOURS,
    LINES,
    NAMES,
    TEXT,
    Bar,
    BarGroup,
    bar_groups,
    gaps,
    is_training,
    write_plots,
)
from thunder_cg.tools.bench.results import BenchmarkResults, ScalingPoint
from thunder_cg.tools.bench.variants import EAGER, FLOOR, OURS, OURS_FUSED, REDUCE_OVERHEAD, THUNDER

RESULTS = resources.files("thunder_cg") / "tools" / "results"
PAGES = {"white": "#ffffff", "dark": "#0d1117"}


def test_bars_say_the_speed_or_why_there_is_none(results: BenchmarkResults) -> None:
    results.add(
        [
            BenchmarkRow(GPT_TRAINING, EAGER, end_to_end_p50=3300.0),
            BenchmarkRow(GPT_TRAINING, THUNDER, end_to_end_p50=6600.0),
            BenchmarkRow(GPT_TRAINING, OURS, end_to_end_p50=1100.0),
            BenchmarkRow(GPT_TRAINING, OURS_FUSED, failure="Unsupported: a sum"),
        ]
    )
    title = f"{GPT_TRAINING} (eager 3.3 ms)"
    training = BarGroup(
        title, (Bar(THUNDER, 0.5, "0.50×"), Bar(OURS, 3.0, "3.0×"), Bar(OURS_FUSED, 0.0, "fails: Unsupported"))
    )
    without_eager = (
        Bar(THUNDER, 0.0, "500 µs; no time of eager"),
        Bar(OURS, 0.0, "110 µs; no time of eager"),
        Bar(OURS_FUSED, 0.0, "not run"),
    )
    failing = (Bar(THUNDER, 0.0, "not run"), Bar(OURS, 0.0, "fails: RuntimeError"), Bar(OURS_FUSED, 0.0, "not run"))
    inference = [BarGroup(MLP, without_eager), BarGroup(SMALL_GPT, failing)]
    assert bar_groups(results) == {"Inference": inference, "Training": [training]}


def test_a_variant_that_no_case_ran_has_no_bars(results: BenchmarkResults) -> None:
    variants = {bar.variant for group in bar_groups(results)["Inference"] for bar in group.bars}
    assert variants == {THUNDER, OURS}
    assert bar_groups(BenchmarkResults({}, [BenchmarkRow(MLP, FLOOR, end_to_end_p50=1.0)])) == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_of_cases_tell_training_from_inference(device: str) -> None:
    for case in cases(torch.device(device), quick=False):
        assert is_training(case.name) == case.trains, case.name


def test_gaps_in_lines_have_a_reason() -> None:
    points = [ScalingPoint("layer", size, OURS, 20.0) for size in (1, 10, 200, 500)]
    points += [ScalingPoint("layer", 1, variant, 70.0) for variant in (THUNDER, FLOOR)]
    points += [ScalingPoint("layer", 10, variant, 0.0, "OutOfMemoryError: 3 GB") for variant in (THUNDER, FLOOR)]
    variants = "thunder, hand-made graph"
    assert gaps(points) == [f"{variants}:\nnot run at 200, 500", f"{variants}:\nfails at 10: OutOfMemoryError"]
    assert gaps([point for point in points if point.variant == OURS]) == []


@pytest.mark.parametrize("page", PAGES)
def test_colours_have_contrast_on_light_and_dark_pages(page: str) -> None:
    """WCAG 2.2: 3 to 1 for what is drawn (1.4.11); 4.5 for text no colour has on both pages, and 4.2 is close."""
    assert contrast(TEXT, PAGES[page]) > 4.2
    for variant, colour in COLOURS.items():
        assert contrast(colour, PAGES[page]) > 3, variant


def test_each_variant_has_its_own_colour() -> None:
    others = [colour for variant, colour in COLOURS.items() if variant != OURS_FUSED]
    assert len({*others}) == len(others)
    assert COLOURS[OURS_FUSED] == COLOURS[OURS]


def test_plots_of_the_readme_are_those_of_the_committed_numbers() -> None:
    """After `bench --json` changed h200.json, draw them again with `--plots thunder_cg/tools/results`."""
    results = BenchmarkResults.from_dict(json.loads((RESULTS / "h200.json").read_text()))
    bars, lines = ((RESULTS / name).read_text() for name in NAMES)
    groups = [group for panel in bar_groups(results).values() for group in panel]
    assert len(groups) == 14
    for group in groups:
        assert f">{group.title}<" in bars
    labels = Counter(bar.label for group in groups for bar in group.bars)
    assert {label: bars.count(f">{label}<") for label in labels} == labels
    for unit in ("layer", "parameter"):
        points = [point for point in results.points if point.unit == unit and point.variant in LINES]
        (gap,) = gaps(points)
        assert all(f">{line}<" in lines for line in gap.splitlines())


def contrast(colour: str, page: str) -> float:
    low, high = sorted((luminance(colour), luminance(page)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """The relative luminance of an sRGB colour, as in WCAG 2.2."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# -------------------------------------------------------------------------------------------------------------- drawing


@pytest.mark.nightly
def test_plots(tmp_path: Path, results: BenchmarkResults) -> None:
    pytest.importorskip("matplotlib")
    written = write_plots(results, tmp_path / "plots")
    assert [path.name for path in written] == ["end_to_end.svg", "host_time.svg"]
    bars, lines = (path.read_text() for path in written)
    assert bars.count(">fails: RuntimeError<") == 1 and bars.count(">not run<") == 1
    assert COLOURS[OURS] in bars and COLOURS[OURS] in lines and COLOURS[REDUCE_OVERHEAD] not in bars
    for text in (bars, lines):
        assert "written by python -m thunder_cg bench" in text[:2000]
        assert "#ffffff" not in text and "#000000" not in text, "no background, and nothing is black"
    write_plots(results, tmp_path / "plots")  # over files of its own
    assert [path.read_text() for path in written] == [bars, lines], "the same results give the same files"
    assert write_plots(BenchmarkResults({}), tmp_path) == []
