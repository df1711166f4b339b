"""Rows as lines and as a table, which the README shows."""

from __future__ import annotations

from samples import ENVIRONMENT, SAMPLE

from thunder_cg.report.rules import RESULTS
from thunder_cg.tools.suite import models
from thunder_cg.tools.suite.results import FORWARD, JIT, MODES, TRAINING, SuiteResults, SuiteRow
from thunder_cg.tools.suite.table import line, markdown


def test_table() -> None:
    lines = markdown(SAMPLE, ENVIRONMENT).splitlines()
    assert lines[2] == (
        "| A (jit) | 100 of 100 ops, 1 region, 2.00 → **0.50** ms | yes | 1,299 of 1,300 ops, 3 regions | yes "
        "| -- | -- | eager (it reads): `item` |"
    )
    assert lines[3] == (
        "| B (thunderfx) | 10 of 20 ops, 2 regions | Thunder varies | fails | -- | -- | -- "
        "| thunderfx leaves to Inductor: `addmm` ×8, `diff`; training fails: TypeError: no; "
        "forward: Thunder varies: loss of step 1 |"
    )
    caption = "a GPU, driver 1.2, torch 2.11.0, 2026-11-21; bfloat16, real sizes."
    assert lines[-1] == f"{caption} What has no times here was compared, and not timed."
    timed = [row for row in SAMPLE if row.captured_us]
    assert markdown(timed, ENVIRONMENT).splitlines()[-1] == caption


def test_a_table_has_all_modes() -> None:
    rows = [SuiteRow("D", "p", mode, JIT, ops=i, captured=i, agrees="yes") for i, mode in enumerate(MODES)]
    header, _, cells, *_ = markdown(rows, ENVIRONMENT).splitlines()
    assert header.split(" | ")[1:-1] == ["forward", "same bits", "training", "same bits", "decode", "same bits"]
    assert [cell.split(" of ")[0] for cell in cells.split(" | ")[1:6:2]] == ["0", "1", "2"]


def test_what_fails_alike_is_said_once() -> None:
    rows = [SuiteRow("C", "p", mode, failure="TypeError: <function f at 0x7f2a>") for mode in (FORWARD, TRAINING)]
    (cells,) = [text for text in markdown(rows, ENVIRONMENT).splitlines() if text.startswith("| C")]
    assert cells.endswith("| forward and training fail: TypeError: <function f> |")


def test_lines() -> None:
    assert line(SAMPLE[0]) == "A, forward, thunder.jit: 100 of 100 ops, 1 region; 2,000 -> 500 us; same bits: yes"
    assert line(SAMPLE[3]) == "B, training: TypeError: no"


def test_page_shows_the_table_of_the_results() -> None:
    text, results = (RESULTS / "RESULTS.md").read_text(encoding="utf-8"), SuiteResults.read(RESULTS / "suite.json")
    assert markdown(results.rows, results.environment) in text, "put what tools.suite prints there"
    assert {found.model for found in results.rows} <= {*models.MODELS}
