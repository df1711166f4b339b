"""The commands of users: `rules` and `explain`, which need no tool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from thunder_cg.__main__ import main

SCRIPT = """
import atexit
import sys

import thunder
import torch

from thunder_cg import cudagraph_transform

def scaled(x):
    y = torch.sin(x) * 2
    return y * y.sum().item()

transforms = [cudagraph_transform(backend="tape")]
module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
jfn, jmodule, plain = thunder.jit(scaled, transforms=transforms), thunder.jit(module, transforms=transforms), torch.sin
alias, without = jfn, thunder.jit(scaled)
if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        jfn(torch.ones(4))
        jmodule(torch.ones(2, 4))
    atexit.register(lambda: print(*(name for name in sys.modules if name.startswith("thunder_cg.tools")), "are tools"))
    sys.exit()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_explain_runs_a_script_and_prints_each_report(script: Path) -> None:
    page = script.with_name("report.html")
    words = ["explain", "--html", str(page), str(script), "3"]
    done = subprocess.run([sys.executable, "-m", "thunder_cg", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    named = [line for line in done.stdout.splitlines() if line in ("jfn:", "jmodule:", "alias:", "without:", "plain:")]
    assert named == ["jfn:", "jmodule:"]
    assert "Tensor.item at script.py:12" in done.stdout and "3 calls, 1 of them without graphs" in done.stdout
    assert done.stdout.splitlines()[-1] == "thunder_cg.tools thunder_cg.tools.explain are tools", "it needs no other"
    assert page.read_text().startswith("<!DOCTYPE html>") and "<h2>jmodule</h2><div" in page.read_text()


def test_explain_says_what_to_do_if_nothing_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, before = tmp_path / "empty.py", (sys.argv, sys.path, sys.modules["__main__"])
    path.write_text("import sys; value = sys.argv[1:]; print(__name__, *value)")
    assert main(["explain", str(path), "--calls", "2"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "__main__ --calls 2\n"
    assert "no global variable" in printed.err and "transforms=[cudagraph_transform()]" in printed.err
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_explain_ends_as_a_script_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("raise SystemExit('no data')")
    with pytest.raises(SystemExit, match="no data"):
        main(["explain", str(path)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: command"),
        (["zoo"], "invalid choice: 'zoo'"),
        (["explain"], "the following arguments are required: FILE"),
        (["explain", "nowhere.py"], "nowhere.py: there is no such file"),
        (["rules"], "the following arguments are required: NAME"),
    ],
)
def test_wrong_arguments(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.partition("commands:\n")[2].splitlines()]
    assert listed == ["demo", "bench", "rules", "explain", "doctor"]


def test_rules_prints_the_record_of_each_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rules", "torch.det", "torch.add"]) == 0
    printed = capsys.readouterr().out
    assert "torch.det" in printed and "torch.add" in printed


def test_rules_refuses_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["rules", "torch.no_such_operator"])
    assert left.value.code == 2
    assert "torch.no_such_operator" in capsys.readouterr().err
