"""`python -m thunder_cg doctor` and `--version`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise

import pytest
import torch

from thunder_cg import __main__ as command_line
from thunder_cg.__main__ import main
from thunder_cg.compat.versions import SUPPORTED
from thunder_cg.tools import doctor


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in doctor._NAMES or name.startswith(doctor._PREFIXES):
            monkeypatch.delenv(name)


def test_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"^torch +{re.escape(torch.__version__.split('+')[0])}", said, re.MULTILINE)
    fusers = "(fused_derivatives, torchs_derivatives, inductor|torchs_derivatives, nvfuser)"
    assert re.search(rf"^thunder_cg.executors\(\) +cudnn_attention, sdpa, derivatives, {fusers}$", said, re.MULTILINE)
    if not torch.cuda.is_available():
        assert "the tape backend stands in" in said
    assert re.search(r"^fuser +(inductor|nvfuser), with executors=", said, re.MULTILINE)
    assert said.endswith("\nNothing to change.\n") and "to change:" not in said


@pytest.mark.parametrize(
    ("variable", "value", "fix"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "unset it: the host waits"),
        ("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", "unset backend:cudaMallocAsync"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "private pools of the caching allocator"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "unset TORCH_NCCL_BLOCKING_WAIT: TORCH_NCCL_BLOCKING_WAIT=1 makes"),
        ("NCCL_BLOCKING_WAIT", "t", "unset NCCL_BLOCKING_WAIT: NCCL_BLOCKING_WAIT=t makes"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "never end goes on"),
        ("NCCL_ASYNC_ERROR_HANDLING", "0", "never end goes on"),
    ],
)
def test_it_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str, fix: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["doctor"]) == 1
    lines = pairwise(capsys.readouterr().out.splitlines())
    line, after = next((line, after) for line, after in lines if line.startswith(variable))
    assert line.endswith(value) and fix in after


def test_variables_that_are_fine_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^NCCL_DEBUG +WARN$", said, re.MULTILINE) and "expandable_segments:True" in said


def test_what_only_a_gpu_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    kind = type("Properties", (), {"name": "A GPU", "total_memory": 80 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: kind)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 1))
    monkeypatch.setattr("thunder_cg.compat.cuda.driver", None)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "to change: pip install 'cuda-bindings==" in said and said.endswith("\n2 to change\n")
    assert "A GPU, 80 GiB" in said and "to change: unset backend: in PYTORCH_CUDA_ALLOC_CONF" in said


def test_a_driver_without_cuda_in_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("thunder_cg.tools.results.driver", lambda: "580.1")
    assert main(["doctor"]) == 1
    assert "sees none, and there is a driver 580.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("package", "is_used", "said", "has_fix"),
    [
        (None, False, "not installed; inductor fuses instead", False),
        ("nvfuser-cu128-torch210", True, "Thunder uses it: nvfuser-cu128-torch210 0.2, built for torch 2.10", False),
        ("nvfuser-cu128-torch29", True, "torch29 0.2, built for torch 2.9 is installed, with another torch", True),
        ("nvfuser-cu128-torch210", False, "torch 2.10 is installed, and Thunder cannot use it", True),
    ],
)
def test_the_pair_of_nvfuser_and_torch(
    monkeypatch: pytest.MonkeyPatch, package: str | None, is_used: bool, said: str, has_fix: bool
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: package if name == "nvfuser" else None)
    monkeypatch.setattr(doctor, "packages_distributions", lambda: {"nvfuser": [package]})
    monkeypatch.setattr(doctor, "_version", lambda name: "2.10.0" if name == "torch" else "0.2")
    found = doctor._nvfuser("inductor", is_used=is_used, has_driver=True)
    assert said in found.found and bool(found.fix) == has_fix
    assert not has_fix or "built for torch 2.10" in found.fix


def test_versions_that_do_not_fit_are_all_that_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SUPPORTED, "torch", ("3.0", "3.1"))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "to change: thunder_cg needs torch >=3.0,<3.1, but torch" in said and "GPU" not in said


def test_other_commands_end_in_a_line_with_versions_that_do_not_fit() -> None:
    code = (
        "import runpy, sys; sys.argv[0] = '-m'; sys.orig_argv[1:3] = ['-m', 'thunder_cg']\n"
        "from thunder_cg.compat import versions; versions.SUPPORTED['torch'] = '3.0', '3.1'; sys.argv[0] = ''\n"
        "runpy.run_module('thunder_cg', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "rules", "torch.det"], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and "error: thunder_cg needs torch >=3.0,<3.1, but torch" in line


def test_version_of_a_source_tree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(command_line, "version", missing)
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == "thunder-cg from a source tree\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"thunder-cg {version('thunder-cg')}\n"
