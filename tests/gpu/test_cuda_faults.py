"""Memory that really runs out, kernels that really fail: each in a process of its own, which may not survive it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

_PRELUDE = """
import gc
import thunder, torch
from torch import nn
from thunder_cg import cudagraph_transform, explain

MB = 2**20

ex = thunder.extend.OperatorExecutor("hidden")
thunder.extend.register_executor(ex)
executors = [ex, *thunder.get_default_executors()]
like = lambda x: thunder.core.proxies.TensorProxy(like=x)
waits = ex.register_operator("waits", fn=lambda x: x * x.sum().item(), meta=like)
is_capturing = torch.cuda.is_current_stream_capturing
raises = ex.register_operator("raises", fn=lambda x: 1 / 0 if is_capturing() else x + 1, meta=like)
unknown = ex.register_operator("unknown", fn=lambda x: x * 2, meta=like)

def reserved():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()

def limit(nbytes):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(nbytes / total)

def fill():
    "Takes what is left, up to a few blocks."
    taken = []
    for size in (16 * MB, 2 * MB):
        while True:
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    return taken

def captures(jfn):
    return [region["captures"] for trace in explain(jfn).to_dict()["traces"] for region in trace["regions"]]

def fallbacks(jfn):
    return [reason for trace in explain(jfn).to_dict()["traces"] for reason in trace["fallbacks"]]

def works():
    "Another model is captured, and random draws go on."
    plain = thunder.jit(model := nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()).cuda())
    graphed = thunder.jit(model, transforms=[cudagraph_transform(debug=True)])
    for step in range(4):
        x = torch.randn(4, 8, device="cuda")
        found = []
        for fn in (plain, graphed):
            torch.manual_seed(step)
            found += [fn(x).detach(), torch.rand(3, device="cuda")]
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert captures(graphed)[0] == 1, explain(graphed)
"""


def run(script: str) -> None:
    """Runs the script in a process of its own, after the prelude."""
    source = _PRELUDE + textwrap.dedent(script)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Exception ignored" not in done.stderr, done.stderr[-4000:]  # of a destructor while the process ends


def test_memory_runs_out_while_capturing():
    """There is memory for the warm-up and none for the input's buffer: the call runs in the memory of the warm-up."""
    run("""
    limit(1024 * MB)
    def fn(x):
        y = torch.tanh(x * 2 + 1)
        return (torch.cos(y) * y * x).sum(1)  # x is alive all along, so that no result can be in its buffer
    graphed = thunder.jit(fn, transforms=[cudagraph_transform()])
    x = torch.randn(4096, 4096, device="cuda")  # 64 MB
    expected = graphed(x)
    taken = fill()
    for _ in range(2):
        assert torch.equal(graphed(x), expected), "the wrong result"
        found = [reason for reason in fallbacks(graphed) if "could not be captured" in reason]
        assert found and "out of memory" in found[0].lower(), (found, explain(graphed))
    assert captures(graphed) == [0]
    del taken
    for _ in range(3):
        assert torch.equal(graphed(x), expected)
    assert captures(graphed) == [1], explain(graphed)
    works()
    """)


def test_what_the_allocator_caches_is_given_to_a_warm_up():
    """PyTorch frees its cached memory when memory runs out, and tries again."""
    run("""
    limit(1024 * MB)
    def fn(x):
        y = torch.tanh(x * 2 + 1)
        return (torch.cos(y) * y).sum(1)
    graphed = thunder.jit(fn, transforms=[cudagraph_transform()])
    x = torch.randn(4096, 4096, device="cuda")  # 64 MB
    expected = thunder.jit(fn)(x)
    torch.cuda.empty_cache()
    cached = [torch.empty(48 * MB, dtype=torch.uint8, device="cuda") for _ in range(18)]
    del cached
    assert torch.cuda.memory_reserved() > 900 * MB
    for _ in range(3):
        assert torch.equal(graphed(x), expected)
    assert captures(graphed) == [1], explain(graphed)
    works()
    """)


@pytest.mark.parametrize("op", ["waits", "raises"])
def test_memory_comes_back_while_the_model_goes_on(op):
    """The arena is no larger than that of the regions that can be captured."""
    run(f"""
    class Net(nn.Module):
        def __init__(self, fails):
            super().__init__()
            self.first, self.second, self.fails = nn.Linear(1024, 1024), nn.Linear(1024, 1024), fails
        def forward(self, x):
            x = unknown(torch.tanh(self.first(x)))
            return {op}(self.second(torch.tanh(self.second(torch.tanh(x)) * 2))) * 3 if self.fails else x
    works()
    arenas, grown = [], []
    for fails in (False, True):
        model = Net(fails).cuda().requires_grad_(False)
        plain = thunder.jit(model, executors=executors)
        jmodel = thunder.jit(model, executors=executors, transforms=[cudagraph_transform(allow=["{op}"])])
        before = reserved()
        for _ in range(6):
            x = torch.randn(4096, 1024, device="cuda")
            assert torch.equal(jmodel(x), plain(x))
        assert captures(jmodel) == ([2, 0] if fails else [1]), explain(jmodel)
        assert "{op} at " in str(explain(jmodel)) or not fails, explain(jmodel)
        del x
        grown.append(reserved() - before)
        arenas.append(explain(jmodel).to_dict()["traces"][0]["arena_bytes"])
        del jmodel, plain, model
        gc.collect()  # before the next model needs a stream with a workspace of its own
    works()
    assert arenas[0] >= 2 * 16 * MB, arenas
    assert arenas[1] <= arenas[0] and grown[1] <= grown[0] + 4 * MB, (arenas, grown)
    """)


def test_memory_comes_back_after_captures_that_failed():
    run("""
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
        def forward(self, x):
            return waits(self.second(torch.tanh(self.first(x)))) * 3
    works()
    before = reserved()
    for _ in range(3):
        model = Net().cuda().requires_grad_(False)
        jmodel = thunder.jit(model, executors=executors, transforms=[cudagraph_transform(allow=["waits"])])
        for _ in range(4):
            jmodel(torch.randn(4096, 1024, device="cuda"))
        assert captures(jmodel) == [0] and "waits" in str(explain(jmodel)), explain(jmodel)
        del jmodel, model
        gc.collect()  # before the next model needs a stream with a workspace of its own
    works()
    assert reserved() <= before + 4 * MB, (reserved(), before)
    """)
