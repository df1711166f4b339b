"""Files that the package writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thunder_cg.errors import FolderError, ForeignFileError
from thunder_cg.files import MARK, refuse_foreign, replace
from thunder_cg.tools.bench.results import BenchmarkResults


def test_only_files_with_the_mark_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    refuse_foreign(None)
    refuse_foreign(path)
    replace(path, f"<!-- {MARK} explain -->")
    refuse_foreign(path)
    for content in (b"# README", b"\xff\x00", b" " * 2000 + MARK.encode()):
        path.write_bytes(content)
        with pytest.raises(ForeignFileError, match=r"report.html exists, .* name another file"):
            refuse_foreign(path)
    with pytest.raises(ValueError, match="exists"):
        refuse_foreign(tmp_path)
    refuse_foreign(Path(os.devnull))
    replace(Path(os.devnull), "as it is")
    assert not Path(os.devnull).is_file()


def test_a_path_where_no_folder_can_be_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for check in (refuse_foreign, BenchmarkResults.check_writable):
        check(tmp_path / "new" / "folder" / "report.json")
        with pytest.raises(FolderError, match=r"report.json cannot be written, as .*file is no folder"):
            check(tmp_path / "file" / "new" / "report.json")


def test_an_interrupted_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    path.chmod(0o640)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replace(path, "after")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"] and path.read_text() == "before"
    replace(path, "after")
    assert path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o640
    (tmp_path / "link").symlink_to(path)
    replace(tmp_path / "link", "through the link")
    assert (tmp_path / "link").is_symlink() and path.read_text() == "through the link"
    replace(tmp_path / "other", "")
    (tmp_path / "usual").touch()
    assert (tmp_path / "other").stat().st_mode == (tmp_path / "usual").stat().st_mode
