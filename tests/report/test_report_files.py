"""Reports in files, and on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from thunder_cg.errors import CudagraphError
from thunder_cg.report import Outside, Report, files, schema, terminal, text


@pytest.fixture
def full(report: Report) -> Report:
    return replace(report, outside=(Outside("Net", "argwhere", "model.py:3", "its shape | depends", 2, "cut"),))


@pytest.mark.parametrize("suffix", [".html", ".md", ".json", ".txt"])
def test_saved_in_the_form_of_the_suffix_and_replaced_later(full: Report, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"report{suffix}"
    Report(()).save(path)
    full.save(str(path))
    content = path.read_text(encoding="utf-8")
    assert "strides changed" in content and "CUDAGraph2" in content and "first call" not in content
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("content", ["# My notes\n", "", "<!DOCTYPE html><html>", '{\n "format": "thunder'])
def test_no_file_is_overwritten_that_is_no_report(report: Report, tmp_path: Path, content: str) -> None:
    for suffix in (".html", ".md", ".json", ".txt"):
        path = tmp_path / f"README{suffix}"
        path.write_text(content)
        with pytest.raises(FileExistsError, match=f"README{suffix} exists, and thunder_cg did not write it; name"):
            report.save(path)
        assert path.read_text() == content


def test_other_suffixes_are_refused_with_those_that_there_are(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"report\.pdf ends with '\.pdf'; .* one of \.html, \.md, \.json, \.txt"):
        report.save(tmp_path / "report.pdf")


def test_an_interrupted_write_leaves_the_old_file(report: Report, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "report.md"
    report.save(path)
    before = path.read_bytes()

    def interrupted(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Report(()).save(path)
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_text_has_80_columns_and_all_its_words(full: Report, tmp_path: Path) -> None:
    full.save(tmp_path / "report.txt")
    mark, _, *lines = (tmp_path / "report.txt").read_text(encoding="utf-8").splitlines()
    assert mark == "thunder_cg report" and max(map(len, lines)) <= 80 < max(map(len, text.render(full).splitlines()))
    assert " ".join("\n".join(lines).split()) == " ".join(text.render(full).split())
    assert terminal.wrap("  a " + "b" * 30 + " " + "c" * 30, 40) == f"  a {'b' * 30}\n      {'c' * 30}"


def test_a_terminal_gets_its_columns_and_colours(full: Report, monkeypatch, capsys) -> None:
    plain = text.render(full)
    full.show()
    assert capsys.readouterr().out == f"{plain}\n" and str(full) == plain

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown() -> str:
        monkeypatch.setattr("sys.stdout", Terminal())
        full.show()
        return terminal.sys.stdout.getvalue()

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("TERM", raising=False)
    said = shown()
    assert said.startswith("\033[1mCUDA graphs: 2 of 5 calls") and "\033[32mCUDAGraph1\033[0m" in said
    assert "\033[31mruns eagerly\033[0m" in said
    without = re.sub(r"\033\[\d+m", "", said)
    assert max(map(len, without.splitlines())) <= 60 and without == f"{full}\n"
    monkeypatch.setenv("TERM", "dumb")
    assert shown() == without
    monkeypatch.delenv("TERM")
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown() == without


def test_markdown_tables_keep_their_cells(full: Report) -> None:
    (trace,) = full.traces
    ops = [replace(op, detail="a|b *c* _d_ <e>\nf", source="x | `y`") for op in trace.ops]
    said = files.markdown.render(replace(full, traces=(replace(trace, ops=tuple(ops)),)))
    rows = [line for line in said.splitlines() if line.startswith("| ")]
    columns = [len(re.findall(r"(?<!\\)\|", row)) - 1 for row in rows]
    assert columns == [5] * 4 + [4] * 4
    for line in (*text.region_counts(trace.regions[0]).split("; "), text.calls(trace), text.entry(trace)):
        assert files.markdown._escape(line) in said, "the words of the other forms"
    item = rows[-1]
    assert r"a\|b \*c\* \_d\_ &lt;e&gt;<br>f" in item and r"<code>x \| \`y\`</code><br>model.py:14" in item
    assert "**CUDA graphs: 2 of 5 calls replayed; 2 regions with 2 of 4 ops; 2 ops eager**" in said


# ---------------------------------------------------------------------------------------------------------------- JSON


def test_json_is_as_its_schema_says_and_loads_as_it_was(full: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    full.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    described = schema.schema(Report)
    jsonschema.Draft202012Validator.check_schema(described)
    jsonschema.validate(content, described)
    assert Report.load(path) == full
    with pytest.raises(CudagraphError, match=r"Report\.profile: this report has no function"):
        Report.load(path).profile()
    content["traces"][0]["ops"][0]["verdict"] = "maybe"
    with pytest.raises(jsonschema.ValidationError, match="'maybe' is not one of"):
        jsonschema.validate(content, described)


def test_the_schema_says_what_fields_mean() -> None:
    described = schema.schema(Report)
    region, op = (described["$defs"][name] for name in ("RegionReport", "OpReport"))
    assert region["description"] == "One region: what it is, and what it did so far."
    assert region["properties"]["bytes_in"] == {
        "type": "integer",
        "description": "bytes copied for one replay into the graph's memory (of the last capture)",
    }
    assert op["properties"]["line"]["description"].startswith('"file.py:12" in the user\'s source and the text there.')
    assert {"type": "null"} in op["properties"]["line"]["anyOf"]


@dataclass(frozen=True)
class Inner:
    number: int


@dataclass(frozen=True)
class Outer:
    """All kinds of fields."""

    pair: tuple[str, int | None]
    by_name: Mapping[str, Inner]  # inner ones
    # may be
    # missing
    last: Inner | None = None
    share: float = 0.5

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def test_all_kinds_of_fields_are_described_and_read() -> None:
    record = Outer(("a", None), {"b": Inner(1)}, Inner(2))
    content, described = schema.dumps(record), schema.schema(Outer)
    jsonschema.validate(json.loads(content), described)
    assert schema.loads(Outer, content, "outer.json") == record
    assert [field.get("description") for field in described["properties"].values()] == [
        *(None, None, None, "inner ones", "may be missing", None)
    ]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(content) | {"pair": ["a", None, 3]}, described)


def test_json_of_another_version_loads_with_what_is_known(full: Report) -> None:
    content = full.to_dict() | {"format": schema.FORMAT, "version": 1, "later": 3}
    del content["traces"][0]["crossings"], content["calls"]
    assert schema.loads(Report, json.dumps(content), "r.json") == full


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": "else", "version": 1}', '{"format": "thunder_cg report", "version": 2, "traces": []}'],
)
def test_what_is_no_report_is_not_loaded(tmp_path: Path, content: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"report\.json is not a thunder_cg report of version 1, which report\.save"):
        Report.load(path)
