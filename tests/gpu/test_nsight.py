"""Nsight Compute shows the names of regions beside the kernels of their graphs. It was not run on a GPU yet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NCU = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nightly,
    pytest.mark.skipif(NCU is None or not torch.cuda.is_available(), reason="no GPU, or no Nsight Compute"),
]
STEP = """
import thunder, torch
from thunder_cg import cudagraph_transform

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()).cuda()
compiled = thunder.jit(model, transforms=[cudagraph_transform(backend="cuda")])
with torch.autograd.profiler.emit_nvtx():
    for _ in range(4):
        compiled(torch.ones(8, 64, device="cuda")).sum().backward()
        torch.cuda.synchronize()
"""


def test_kernels_of_a_graph_have_the_name_of_their_region(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(STEP)
    command = [str(NCU), "--nvtx", "--graph-profiling", "node", "--section", "LaunchStats", "--target-processes", "all"]
    found = subprocess.run([*command, sys.executable, str(script)], capture_output=True, text=True, timeout=150)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    for name in ("CUDAGraph1 of Sequential, forward", "CUDAGraph2 of Sequential, backward"):
        assert name in found.stdout, found.stdout[-4000:]
