"""The commands of users: `rules` and `explain`, which need no tool."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from thunder_cg.__main__ import main
from thunder_cg.tools.arguments import interruptible

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


@pytest.mark.nightly
def test_explain_runs_a_script_and_prints_each_report(script: Path) -> None:
    page = script.with_name("report.html")
    words = ["explain", "--html", str(page), str(script), "3"]
    done = subprocess.run([sys.executable, "-m", "thunder_cg", *words], capture_output=True, text=True)
    eager, backward = done.stderr.splitlines()  # no warning of another package is shown
    assert (done.returncode, eager) == (1, "not captured: jfn: 2 ops eager")
    assert backward == (
        "not captured: jmodule: the backward of Sequential, compiled version 0, which never ran: 1 region without a "
        "graph (CUDAGraph3)"
    )
    assert "No backward ran of Sequential, compiled version 0: for inference, call it under" in done.stdout
    named = [line for line in done.stdout.splitlines() if line in ("jfn:", "jmodule:", "alias:", "without:", "plain:")]
    assert named == ["jfn:", "jmodule:"]
    assert "Tensor.item at script.py:12" in done.stdout and "3 calls: 1 replayed, 1 warm-up, 1 capture" in done.stdout
    tools = "thunder_cg.tools thunder_cg.tools.arguments thunder_cg.tools.explain are tools"
    assert done.stdout.splitlines()[-1] == tools, "it needs no other"
    written = page.read_text()
    assert written.startswith("<!DOCTYPE html>") and "<h2>jmodule</h2><div" in written
    assert "prefers-color-scheme: dark" in written


def test_explain_says_what_to_do_if_nothing_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, before = tmp_path / "empty.py", (sys.argv, sys.path, sys.modules["__main__"])
    path.write_text("import sys; value = sys.argv[1:]; print(__name__, *value)")
    assert main(["explain", str(path), "--calls", "2"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "__main__ --calls 2\n"
    assert "no global variable" in printed.err and "transforms=[cudagraph_transform()]" in printed.err
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_explain_of_a_script_that_ends_before_it_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ends.py"
    path.write_text("import sys; sys.exit(3)")
    with pytest.raises(SystemExit, match="3"):
        main(["explain", str(path)])
    assert "no global variable" in capsys.readouterr().err


def test_what_thunder_cannot_compile_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "branches.py"
    path.write_text("import torch\ndef make():\n  return lambda x: x if x.sum() > 0 else x + 1, torch.ones(3)\n")
    assert main(["explain", f"{path}:make"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("NotImplementedError: casting") and len(said.err.splitlines()) == 1
    assert said.out.count("To try: ") == 1


SINE = """
import thunder, torch
from thunder_cg import cudagraph_transform
jsine = thunder.jit(lambda x: torch.sin(x) * 2, transforms=[cudagraph_transform(backend="tape")])
"""


def test_explain_finds_parts_of_modules_and_what_lists_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "parts.py"
    path.write_text(
        f"{SINE}model, functions = torch.nn.Sequential(torch.nn.Tanh()), [jsine, torch.cos]\ndel jsine\n"
        "model.part = thunder.jit(torch.nn.Softplus(), transforms=[cudagraph_transform(backend='tape')])\n"
        "for size in (2, 3, 4): functions[0](torch.ones(size)), model.part(torch.ones(size))\n"
    )
    assert main(["explain", str(path)]) == 1
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if line.endswith(":")][:1] == ["model.part:"]
    assert (
        "\nfunctions[0]:\nCUDA graphs: 0 of 3 calls replayed; 3 regions with 6 of 6 ops in 3 compiled versions"
        in said.out
    )
    line = said.err.splitlines()[-1]
    assert line.startswith(
        "not captured: functions[0]: the forward of <lambda>, 3 compiled versions, which ran 1 time each"
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("def f(x):\n  print('x')\n  return torch.sin(x) * 2", "other than in PyTorch: jf: print() at lost.py:"),
        ("class f(torch.nn.Module):\n  last = 0\n  def forward(self, x):\n    self.last = torch.sin(x) * 2\n"
         "    return self.last + 1\nf = f()", "other than in PyTorch: jf: self.last at lost.py:"),
        ("def f(x): return torch.sin(x * p) * 2\np = torch.ones(3, requires_grad=True)\nkept = []",
         "not captured: jf: the forward of f, which ran 6 times, never replayed: all 2 memory pools are in use"),
    ],
)  # fmt: skip
def test_explain_ends_with_an_error_if_something_is_lost_or_nothing_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, said: str
) -> None:
    path = tmp_path / "lost.py"
    jit = "thunder.jit(f, transforms=[cudagraph_transform(backend='tape', max_arenas=2)])"
    keep = "kept.append(jf(torch.ones(3)))" if "kept" in script else "jf(torch.ones(3))"
    start = SINE.partition("jsine")[0]
    path.write_text(f"{start}{script}\njf = {jit}\nfor _ in range(6): {keep}\n")
    assert main(["explain", str(path)]) == 1
    assert said in capsys.readouterr().err


def test_explain_ends_as_a_script_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fails.py"
    path.write_text(f"{SINE}for _ in range(3): jsine(torch.ones(3))\nraise SystemExit('no data')")
    with pytest.raises(SystemExit, match="no data"):
        main(["explain", str(path)])
    assert capsys.readouterr().out.startswith("jsine:\nCUDA graphs: 1 of 3 calls replayed")


MODELS = """
import torch

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), torch.ones(2, 4)

def reads():
    return lambda x, scale: torch.sin(x) * scale * x.sum().item(), {"x": torch.ones(3), "scale": 2}

def makes_nothing():
    return 3

def needs(x, y, z=1):
    return x

model = torch.nn.Linear(4, 4)
"""

STEPS = """
import thunder
import torch

from thunder_cg import cudagraph_transform, graphed_step

model = torch.nn.Linear(4, 4)
jmodel = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def function(x):
    optimizer.zero_grad()
    loss = jmodel(x).sum()
    loss.backward()
    optimizer.step()
    return loss

step = graphed_step(function, modules=jmodel, optimizers=optimizer, backend="tape")
for _ in range(CALLS):
    step(torch.ones(2, 4))
"""


def test_explain_calls_what_a_function_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "models.py", tmp_path / "report.json"
    path.write_text(MODELS)
    assert main(["explain", "--json", str(page), f"{path}:make_model"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("make_model:\n") and "Sequential, backward, compiled version 0" in said
    content = json.loads(page.read_text())
    assert content["generator"] == "written by python -m thunder_cg explain"
    forward, backward = content["reports"]["make_model"]["traces"]
    assert [t["calls"] for t in (forward, backward)] == [3, 3] and forward["regions"][0]["captures"] == 1

    assert main(["explain", "--calls", "1", f"{path}:reads"]) == 1
    assert "Tensor.item at models.py:8" in capsys.readouterr().out


@pytest.mark.parametrize(("raises", "code"), [("jcalled(x[None])", 1), ("raise KeyboardInterrupt", 130)])
def test_explain_says_what_ran_before_a_script_raised(
    raises: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "raises.py", tmp_path / "report.json"
    path.write_text(
        "import thunder, torch\nfrom thunder_cg import cudagraph_transform\ndef called(x):\n"
        "  return torch.sin(x) * 2 if x.dim() == 1 or x.any() else x\n"
        "jcalled, x = thunder.jit(called, transforms=[cudagraph_transform(backend='tape')]), torch.ones(3)\n"
        f"for _ in range(3): jcalled(x)\n{raises}\n"
    )
    assert main(["explain", "--json", str(page), str(path)]) == code
    printed = capsys.readouterr()
    assert printed.out.startswith("jcalled:\nCUDA graphs: 1 of 3 calls replayed") and page.exists()
    if code == 1:
        assert "NotImplementedError at raises.py:4: casting a TensorProxy to a Python boolean" in printed.out
        assert printed.err.startswith(f'Traceback (most recent call last):\n  File "{path}", line 7, in <module>')
    else:
        assert printed.err == "interrupted\n"


def test_explain_says_what_a_function_raised_that_was_to_make_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "raises.py"
    path.write_text("def make():\n    raise ValueError('no data')\n")
    assert main(["explain", f"{path}:make"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f'Traceback (most recent call last):\n  File "{path}", line 2, in make\n')
    assert said.err.endswith("ValueError: no data\n") and not said.out


@pytest.mark.nightly
def test_explain_counts_what_ran_inside_of_a_step_as_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.py"
    for calls, code in ((4, 0), (1, 1)):  # the second call captures
        path.write_text(STEPS.replace("CALLS", str(calls)))
        assert main(["explain", str(path)]) == code
        said = capsys.readouterr().out
        assert said.startswith("step:\nStep function: ") and "jmodel:\nCUDA graphs: none of its own" in said
    path.write_text(STEPS.replace("loss = jmodel(x).sum()", "loss = jmodel(x).cos().sum()").replace("CALLS", "4"))
    assert main(["explain", str(path)]) == 0  # the model's backward has a region, too
    assert "jmodel:\nCUDA graphs: none of its own" in capsys.readouterr().out


def test_explain_refuses_what_it_cannot_call_or_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    for words, said in (
        ([f"{path}:makes_nothing"], "makes_nothing() returned a value of type int; return a model and its inputs"),
        ([f"{path}:other"], "the file has no function 'other'; it has make_model, reads, makes_nothing, needs"),
        ([f"{path}:model"], "model is called without arguments, and needs its inputs; give a function that returns"),
        ([f"{path}:needs"], "needs is called without arguments, and needs x, y; give a function that returns"),
        ([f"{path}:reads", "1"], "unrecognized arguments: 1"),
        ([f"{path}:reads", "--calls", "0"], "argument --calls: 0: give 1 or more"),
        (["--html", str(path), str(path)], f"{path} exists, and thunder_cg did not write it"),
        (["--html", f"{path}.x", "--json", f"{path}.x", str(path)], "give each a file of its own"),
        (["--calls", "x", str(path)], "argument --calls: 'x' is no whole number"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["explain", *words])
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert path.read_text() == MODELS


def test_warnings_of_other_packages_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(argv: Sequence[str]) -> int:
        for module in ("thunder.executors.transformer_engineex", "thunder_cg.transform"):
            warnings.warn_explicit(f"of {module}", UserWarning, "file.py", 1, module)
        return 3 + logging.getLogger("torch.utils.cpp_extension").isEnabledFor(logging.WARNING)

    both = ["of thunder.executors.transformer_engineex", "of thunder_cg.transform"]
    for options, expected in ((["default"], both), ([], both[1:])):
        monkeypatch.setattr(sys, "warnoptions", options)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert interruptible(warn, []) == 3 + len(options)
        assert [str(each.message) for each in said] == expected


@pytest.mark.nightly_after(2)
@pytest.mark.parametrize(
    "command",
    ["", "demo", "bench", "rules", "explain", "doctor"]
    + [f".tools.{name}" for name in ("suite", "operators", "generation", "thunder_benchmarks")],
)
def test_help_imports_no_torch(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it takes 0.1 s, where torch and Thunder take several seconds."""
    module, command = (f"thunder_cg{command}", "") if command.startswith(".") else ("thunder_cg", command)
    code = (
        f"import runpy, sys; sys.argv[0] = '-m'; sys.orig_argv[1:3] = ['-m', {module!r}]\n"
        "import thunder_cg; sys.argv[0] = 'thunder_cg'\n"
        f"try: runpy.run_module({module!r}, run_name='__main__')\n"
        "except SystemExit as end: print(end.code, sorted({'torch', 'thunder'} & sys.modules.keys()))\n"
    )
    words = [sys.executable, "-c", code, *filter(None, [command]), "--help"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_a_script_that_is_interrupted_before_it_imports_anything(tmp_path: Path) -> None:
    """Imports of torch that were interrupted raise when they are made again."""
    (tmp_path / "script.py").write_text("raise KeyboardInterrupt\n")
    code = (
        "import sys; sys.argv[0] = '-m'; sys.orig_argv[1:3] = ['-m', 'thunder_cg']\n"
        "from thunder_cg.tools import explain\n"
        "print(explain.main([sys.argv[1]]), sorted({'torch', 'thunder'} & sys.modules.keys()))\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "script.py")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("130 []\n", "interrupted\n")


def test_an_interrupted_command_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("thunder_cg.__main__._COMMANDS", {"rules": interrupted})
    assert main(["rules"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interruption_of_which_a_package_makes_another_error(capsys: pytest.CaptureFixture[str]) -> None:
    """As NumPy does, if its import is interrupted."""

    def imports(argv: Sequence[str]) -> int:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("too deep") from None
        return 0

    def fails(argv: Sequence[str]) -> int:
        raise RecursionError

    before = signal.getsignal(signal.SIGINT)
    assert interruptible(imports, []) == 130
    assert capsys.readouterr().err == "interrupted: RecursionError: too deep\n"
    with pytest.raises(RecursionError):
        interruptible(fails, [])
    assert signal.getsignal(signal.SIGINT) is before


def test_explain_says_that_a_compilation_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Thunder makes an error of it, which says that the function cannot be compiled."""
    path = tmp_path / "models.py"
    path.write_text(
        "import signal, torch\nfrom unittest.mock import patch\nfrom thunder.core.trace import TraceCtx\n"
        "patch.object(TraceCtx, 'add_name', lambda *args: signal.raise_signal(signal.SIGINT)).start()\n"
        "def make(): return torch.sin, (torch.ones(3),)\n"
    )
    try:
        assert main(["explain", "--html", str(tmp_path / "report.html"), f"{path}:make"]) == 130
    finally:
        patch.stopall()
    said = capsys.readouterr()
    assert said.err == "interrupted\n"
    assert "Nothing is compiled. Thunder raised while it compiled, in 1 of 1 call: it was interrupted." in said.out
    assert {file.name for file in tmp_path.iterdir()} == {"models.py", "report.html"}


def test_a_command_whose_reader_has_gone_ends_in_silence() -> None:
    code = (
        "import sys; sys.argv[0] = '-m'; sys.orig_argv[1:3] = ['-m', 'thunder_cg']\n"
        "from thunder_cg import __main__\n"
        "__main__._COMMANDS = {'rules': lambda argv: print('a report') or 0}\n"
        "sys.exit(__main__.main(['rules']))\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo", "--device", "cpu:3"], "--device cpu:3: torch has one CPU device; give cpu"),
        (["bench", "--device", "cuda:99"], "--device cuda:99: torch "),
        (["bench", "--calls", "x"], "argument --calls: 'x' is no whole number; give 1 or more"),
        (["demo", "--parallel", "fsdp"], "--parallel fsdp is for several ranks; give --gpus N, too"),
        (["zoo"], "invalid choice: 'zoo'"),
        (["explain"], "the following arguments are required: FILE[:NAME] ("),
        (["explain", "nowhere.py"], "nowhere.py: there is no such file"),
        (["rules"], "the following arguments are required: NAME"),
    ],
)
def test_wrong_arguments(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    helped = capsys.readouterr().out
    assert main([]) == 2 and capsys.readouterr().err == helped
    listed = [line.split()[0] for line in helped.partition("commands:\n")[2].splitlines()]
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
