from __future__ import annotations

import re
from html.parser import HTMLParser

from thunder_cg.report import Report

_VOID = {"br"}


class _Outline(HTMLParser):
    """Fails on a tag that is closed out of order, and collects the rows of all tables as (style, cells)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[tuple[str, list[str]]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append((dict(attrs).get("style") or "", []))
        if tag in ("td", "th"):
            self.rows[-1][1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][1][-1] += data


def _rows(report: Report) -> list[tuple[str, list[str]]]:
    return _Outline(report._repr_html_()).rows


def test_one_row_per_op_in_the_order_of_the_plan_with_the_frame_folded(report: Report) -> None:
    ops = [cells[0] for _, cells in _rows(report) if len(cells) == 6]
    folded = ["unpack_trivial x2", "TorchCompile0 (add, mul)", "Tensor.item", "Tensor.item", "torch.tanh", "return"]
    assert ops == ["op", *folded]


def test_every_verdict_has_its_own_colour(report: Report) -> None:
    colours = {cells[1]: style for style, cells in _rows(report) if len(cells) == 6 and style}
    assert set(colours) == {"capture", "eager", "bookkeeping"}
    assert len(set(colours.values())) == 3


def test_ops_stand_under_their_region(report: Report) -> None:
    headings = [cells[0] for _, cells in _rows(report) if len(cells) == 1]
    assert [heading.split()[0] for heading in headings] == ["CUDAGraph1", "CUDAGraph2"]
    assert "ended by: Tensor.item at model.py:14" in headings[0]


def test_text_is_escaped(report: Report) -> None:
    page = report._repr_html_()
    assert "&lt;f51&gt;" in page and "<f51>" not in page
    assert "<code>if x.item() &lt; 0:</code><br>model.py:14" in page
    assert "operation not permitted &amp; &lt;gone&gt;" in page


def test_loads_nothing_and_sets_no_text_colour(report: Report) -> None:
    page = report._repr_html_()
    assert not re.search(r"https?:|src=|href=|url\(|<script|<style|@import", page)
    assert not re.search(r'[;" ]color:', page)


def test_empty_report_says_what_to_do() -> None:
    assert "first call" in Report(())._repr_html_()
