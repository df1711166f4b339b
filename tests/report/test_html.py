from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from thunder_cg.report import (
    ArenaMemory,
    CollectiveReport,
    CrossingReport,
    MemoryReport,
    RecordingMemory,
    RegionReport,
    Report,
    TraceReport,
    html,
)
from thunder_cg.report.differences import Differences

_VOID = {"br", "col", "meta"}


class _Outline(HTMLParser):
    """Fails on a tag that is closed out of order, and collects the rows of all tables as (style, is folded, cells)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, Any]]] = []
        self.rows: list[tuple[str, bool, list[str]]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            folded = any(name == "details" and "open" not in given for name, given in self.open)
            self.rows.append((dict(attrs).get("style") or "", folded, []))
        if tag in ("td", "th"):
            self.rows[-1][2].append("")
        if tag not in _VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {tag for tag, _ in self.open}:
            self.rows[-1][2][-1] += data


def _rows(report: Report) -> list[tuple[str, bool, list[str]]]:
    return _Outline(report._repr_html_()).rows


def test_one_row_per_op_beside_its_source_in_the_order_of_the_plan(report: Report) -> None:
    assert [(cells[0], cells[1]) for _, _, cells in _rows(report) if len(cells) == 4] == [
        ("source", "op"),
        ("model.py:12", "TorchCompile0 (add, mul)"),
        ("if x.item() < 0:model.py:14", "Tensor.item"),
        ("", "torch.tanh"),
    ]
    (same_line,) = (cells for _, _, cells in _rows(report) if len(cells) == 3)
    assert same_line == ["Tensor.item", "eager, data-dependent: the host waits for <f52>", "keep it in a tensor"]
    assert 'rowspan="2"' in report._repr_html_()
    assert [cells for _, _, cells in _rows(report) if len(cells) == 1] == [
        ["bookkeeping: unpack_trivial x2"],
        ["bookkeeping: return"],
    ]


def test_every_verdict_has_its_own_colour_and_captured_rows_are_folded(report: Report) -> None:
    _, unpack, fusion, item, _, tanh, _ = _rows(report)
    assert len({unpack[0], fusion[0], item[0]}) == 3 and tanh[0] == fusion[0]
    assert [row[1] for row in (unpack, fusion, item, tanh)] == [False, True, False, True]


def test_versions_that_differ_in_sizes_only_are_folded(report: Report) -> None:
    (trace,) = report.traces
    fine = replace(trace, regions=tuple(replace(region, failure=None) for region in trace.regions))
    page = replace(
        report, traces=(fine, replace(fine, entry=1), replace(fine, entry=2, ops=trace.ops[1:]))
    )._repr_html_()
    found = re.findall(r"<details( open)?><summary><b>[^<]*version (\d)", page)
    assert found == [(" open", "0"), ("", "1"), (" open", "2")]


def test_a_region_says_what_it_did_and_is_red_if_it_runs_eagerly(report: Report) -> None:
    page = report._repr_html_()
    good, bad = (re.search(f'<summary style="([^"]*)"><b>{name}</b>(.*?)</summary>', page) for name in _REGIONS)
    assert good is not None and "1 op: 1 capture, 2 replays" in good[2] and "ended by: Tensor.item at" in good[2]
    assert bad is not None and "runs eagerly" in bad[2] and bad[1] != good[1]


def test_a_region_without_a_graph_is_neither_green_nor_red(report: Report) -> None:
    (trace,) = report.traces
    fine = trace.regions[0]
    kinds = (fine, replace(fine, captures=0, eager_runs=0), replace(fine, captures=0, eager_runs=3))
    pages = [
        replace(report, traces=(replace(trace, regions=(each, trace.regions[1])),))._repr_html_() for each in kinds
    ]
    captured, planned, eager = (re.findall(r'<summary style="([^"]*)"><b>CUDAGraph1', page) for page in pages)
    assert captured != planned == eager and f'fill="{eager[0].partition(": ")[2]}"' in pages[2].split("CUDAGraph1")[1]


_REGIONS = ("CUDAGraph1", "CUDAGraph2")


def test_it_opens_with_the_lines_of_the_text(report: Report) -> None:
    page = report._repr_html_()
    text = re.sub(r"<style>.*?</style>|<[^>]*>", "\n", page, flags=re.DOTALL)
    said = [line.strip() for line in str(report).split("\n\n")[0].splitlines()]
    assert [line.replace("&lt;", "<").replace("&gt;", ">") for line in text.split("\n") if line][: len(said)] == said


def test_text_is_escaped(report: Report) -> None:
    page = report._repr_html_()
    assert "&lt;f51&gt;" in page and "<f51>" not in page
    assert "<code>if x.item() &lt; 0:</code><br>model.py:14" in page
    assert "operation not permitted &amp; &lt;gone&gt;" in page


def test_loads_nothing_and_needs_no_style_sheet_for_the_colours(report: Report) -> None:
    changes = Report(()).differences(report)
    for page in (report._repr_html_(), html.page(report._repr_html_(), "Net"), changes._repr_html_()):
        assert not re.search(r"https?:(?!//www.w3.org/2000/svg)|src=|href=|url\(|<script|@import", page)
    assert not re.search(r'[;"{ ]color:', report._repr_html_())


def test_empty_report_says_what_to_do() -> None:
    assert "first call" in Report(())._repr_html_()


# --------------------------------------------------------------------------------------------------------- differences


def test_differences_are_a_table_for_each_trace_with_what_is_better_and_worse(report: Report) -> None:
    (trace,) = report.traces
    fewer = replace(trace, ops=trace.ops[:-3], regions=trace.regions[:1], fallbacks={})
    fewer = replace(fewer, arena_bytes=trace.arena_bytes + 100_000)
    changes = replace(report, traces=(fewer,), breaks=()).differences(report)
    page = changes._repr_html_()
    rows = _Outline(page).rows
    assert page.index(escape(changes.before)) < page.index(escape(changes.after)) < page.index("<table")
    assert [cells for _, _, cells in rows if cells != ["what", "before", "after", ""]] == [
        ["regions", "2", "1", ""],
        ["captured ops", "2", "1", ""],
        ["eager ops", "2", "1", "better"],
        ["in memory pools", "1.5 KiB", "99.2 KiB", "worse"],
        ["Tensor.item in `if x.item() < 0:`", "eager: data-dependent", "not there", ""],
        ["calls without graphs, as strides changed", "some", "none", "better"],
        ["failure of a region", "operation not permitted & <gone>", "none", "better"],
    ]
    colours = {cells[-1]: style for style, _, cells in rows[1:]}
    assert len(set(colours.values())) == 3 and html.differences(report.differences(report)).count("<table") == 0


# ------------------------------------------------------------------------------------------------------------- picture


def _with_crossings(report: Report) -> Report:
    (trace,) = report.traces
    crossings = (
        CrossingReport("x", "float32[4]", 16, None, (2, 4)),
        CrossingReport("t1", "float32[<n>]", 1024, 2, (3, 6)),
        CrossingReport("f51", "number", 0, 3, (4,)),
        CrossingReport("t2", "float32[4]", 16, 4, (6,)),
    )
    return replace(report, traces=(replace(trace, crossings=crossings),))


def test_picture_has_a_box_for_each_step_and_a_line_for_what_crosses(report: Report) -> None:
    page = _with_crossings(report)._repr_html_()
    _Outline(page)
    picture = page.split("<svg")[1].split("</svg>")[0]
    titles = re.findall(r'font-weight="bold">(.*?)</text>', picture)
    assert titles == [
        "inputs",
        "CUDAGraph1: 1 op on cuda:0",
        "Tensor.item: eager",
        "CUDAGraph2: 1 op on cuda:0, runs eagerly",
        "results",
    ]
    assert re.findall(r'opacity="0.8">(.*?)</text>', picture) == [
        "1 value, 16 B from inputs",
        "1 value, 1.0 KiB from CUDAGraph1",
        "1 value, 16 B from inputs; 1 value from Tensor.item",
        "1 value, 1.0 KiB from CUDAGraph1; 1 value, 16 B from CUDAGraph2",
    ]
    assert picture.count('fill="none"') == 6 and "t1: float32[&lt;n&gt;]" in picture
    (trace,) = report.traces
    page = replace(report, traces=(trace, replace(trace, kind="backward")))._repr_html_()
    assert re.findall(r">(results[^<]*|gradients)</text>", page) == [
        "results, and what is saved for the backward",
        "gradients",
    ]


def _collective(group: str, issued_by: int, waited_by: int | None, *, overlaps: bool = True) -> CollectiveReport:
    return CollectiveReport("all_reduce", 1024, group, 2, True, issued_by, overlaps, issued_by, waited_by)


def test_collectives_have_a_column_for_each_group_beside_the_steps_of_their_own_stream(report: Report) -> None:
    (trace,) = _with_crossings(report).traces
    found = (
        _collective("dp", 2, 2),
        _collective("dp", 2, 3, overlaps=False),
        _collective("dp", 4, 4),
        _collective("<tp>", 3, None),  # it waits for itself, so it is one of the steps
        _collective("ep", 2, 4),
    )
    page = Report((replace(trace, collectives=found),))._repr_html_()
    _Outline(page)
    assert "Collectives on the left run beside them until they are waited for" in page
    assert re.findall(r"<title>([^<]*) with compute</title>", page) == [
        "2 all_reduce: 2.0 KiB; 1 can overlap",
        "1 all_reduce: 1.0 KiB; 1 can overlap",
        "1 all_reduce: 1.0 KiB; 1 can overlap",
    ]
    assert ">group dp<" in page and ">group ep<" in page and ">group &lt;tp" not in page
    spans = [
        (int(y), int(height)) for y, height in re.findall(r'<rect x="\d+" y="(\d+)" width="180" height="(\d+)"', page)
    ]
    assert [height // 70 for _, height in spans] == [1, 0, 2], "boxes they stand beside, but one"
    assert "Nothing runs beside them." in Report((trace,))._repr_html_()


def test_a_plan_of_one_step_needs_no_picture(report: Report) -> None:
    (trace,) = report.traces
    one = replace(trace, ops=trace.ops[:3], regions=trace.regions[:1])
    assert "<svg" not in Report((one,))._repr_html_()
    assert "<svg" in Report((replace(one, collectives=(_collective("dp", 2, 2),)),))._repr_html_()


@pytest.fixture
def large(report: Report) -> Report:
    """5,000 ops in 100 regions."""
    _, _, _, item, _, add, _ = report.traces[0].ops
    ops = [replace(add, index=i, name="torch.add", region=f"CUDAGraph{i // 50}", line=f"m.py:{i}") for i in range(5000)]
    for i in range(49, 5000, 50):
        ops[i] = replace(item, index=i)
    regions = [RegionReport(f"CUDAGraph{i}", "cuda:0", 49, "", 1, 3, 1, 0, 0, None) for i in range(100)]
    crossings = tuple(CrossingReport(f"t{i}", "float32[4]", 16, i - 1, (i,)) for i in range(49, 5000, 50))
    return Report((TraceReport("Net", 0, "forward", (*ops,), (*regions,), 5, 1, {}, 0, crossings=crossings),))


def test_a_trace_of_5000_ops_is_a_small_page_with_the_first_steps_in_the_picture(large: Report) -> None:
    page = large._repr_html_()
    assert len(page) < 1_500_000 and page.count("torch.add") == 4900
    assert "The picture has the first 40 of 202 steps." in page and page.count("<rect") == 40


# ------------------------------------------------------------------------------------------------------------- browser


_MEASURE = """() => {
  const at = (selector) => document.querySelector(selector).getBoundingClientRect();
  const rows = [...document.querySelectorAll("details[open] > table tr")].filter((row) => row.children.length == 4);
  const style = getComputedStyle(document.body);
  const boxes = document.querySelectorAll("details > details").length;
  const closed = document.querySelectorAll("details > details:not([open])").length;
  const columns = [...new Set(rows.map((row) => Math.round(row.children[1].getBoundingClientRect().x)))];
  return { width: document.documentElement.scrollWidth, window: innerWidth, columns,
    background: style.backgroundColor, color: style.color, boxes, closed, headline: at(".thunder-cg > p").y,
    loaded: performance.getEntriesByType("navigation")[0].domComplete };
}"""


@pytest.fixture
def page() -> Iterator[Any]:
    """A page of the machine's Chromium, or of what `playwright install chromium` installed."""
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    with sync_playwright() as started:
        if path is None and not Path(started.chromium.executable_path).exists():
            pytest.skip("no Chromium")
        browser = started.chromium.launch(executable_path=path)
        yield browser.new_page()
        browser.close()


def _measured(page: Any, path: Path, saved: Report | Differences, width: int, scheme: str) -> dict[str, Any]:
    """Shows what is saved, which is one file without a script, and what the browser says of it."""
    saved.save(path)
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(path.as_uri())
    assert loaded == [path.as_uri()] and not page.query_selector("script")
    return page.evaluate(_MEASURE)


@pytest.mark.nightly
def test_in_a_browser(page: Any, report: Report, large: Report, tmp_path: Path) -> None:
    (trace,) = _with_crossings(report).traces
    beside = (_collective("dp", 2, 4), _collective("ep", 4, 4))
    recordings = (RecordingMemory("Net", 0, (0,), 3, 8192, 4096, ()),)  # a long line
    ledger = MemoryReport((ArenaMemory(0, 8192, 0, False),), recordings)
    shown = replace(report, traces=(replace(trace, collectives=beside),))
    wide = _measured(page, tmp_path / "wide.html", shown, 1400, "light")
    shown = replace(_with_crossings(report), memory=ledger)
    narrow = _measured(page, tmp_path / "narrow.html", shown, 500, "dark")
    least = _measured(page, tmp_path / "least.html", shown, 80, "light")
    changes = _measured(page, tmp_path / "changes.html", large.differences(report), 500, "dark")
    most = _measured(page, tmp_path / "large.html", large, 1400, "light")
    shown_all = (wide, narrow, least, most, changes)
    assert all(each["width"] <= each["window"] for each in shown_all), "it scrolls to the side"
    assert len(wide["columns"]) == 1 and len(most["columns"]) == 1, "columns are not aligned"
    assert (wide["background"], wide["color"]) == ("rgb(255, 255, 255)", "rgb(31, 35, 40)")
    assert (narrow["background"], narrow["color"]) == ("rgb(20, 23, 28)", "rgb(227, 230, 234)")
    assert wide["boxes"] == wide["closed"] == 3 and most["boxes"] == most["closed"] == 101
    assert 0 <= wide["headline"] < 50 and 0 < most["loaded"] < 2000
    assert changes["background"] == narrow["background"]
    said = "(cell) => getComputedStyle(cell, '::before').content"
    page.set_viewport_size({"width": 500, "height": 800})
    page.goto((tmp_path / "narrow.html").as_uri())
    assert page.eval_on_selector("td:last-child:not([colspan]):not(:empty)", said) == '"to change it: "'
    page.goto((tmp_path / "changes.html").as_uri())
    assert page.eval_on_selector("td:last-child", said) == "none"
    page.set_viewport_size({"width": 1400, "height": 800})
    page.goto((tmp_path / "large.html").as_uri())

    folded = page.get_by_text("m.py:4998")
    assert not folded.is_visible()
    page.get_by_text("CUDAGraph99 on").click()  # a region unfolds to its ops, whose table has a border
    columns = page.evaluate(_MEASURE)["columns"]
    assert folded.is_visible() and max(columns) - min(columns) < 4
