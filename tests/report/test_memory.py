"""The ledger: what each arena, recording and region costs. Shared memory counts once."""

from __future__ import annotations

import json
from dataclasses import replace

import thunder
import torch
from models import Linear
from torch import nn

from thunder_cg import cudagraph_transform, explain, release
from thunder_cg.report import (
    ArenaMemory,
    MemoryPreview,
    MemoryReport,
    RecordingMemory,
    RegionMemory,
    markdown,
    text,
    units,
)

N = 1000  # elements of 4 bytes


def fn(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.relu(x * 2) + 1)


def test_a_function_to_the_byte(backend, device):
    transform = cudagraph_transform(backend=backend)
    jitted = thunder.jit(fn, transforms=[transform])
    assert explain(jitted).memory == MemoryReport()
    preview = MemoryPreview("fn", 0, "forward", needs=12 * N, without_graphs=8 * N)
    for call in range(5):
        jitted(torch.randn(N, device=device))
        report = explain(jitted)
        assert report.memory.previews == ((preview,) if call == 0 else ())
    (arena,), (recording,) = report.memory.arenas, report.memory.recordings
    (region,) = recording.regions
    assert (region.copied_in, region.copied_out) == (4 * N, 4 * N)
    assert region.static_buffers == 4 * N
    assert region.without_graphs == recording.without_graphs == 8 * N  # an op's input and its result
    assert (recording.function, recording.entry, recording.arenas) == ("fn", 0, (0,))
    assert recording.replays == 3
    assert recording.needs == 12 * N  # with the copy of x
    assert report.memory.pools == arena.pool == transform._shared.arenas.nbytes() >= 12 * N
    if backend == "tape":
        assert arena.pool == 20 * N  # the copy of x, and what each of four ops has made
        assert (region.graph, report.memory.graphs, report.memory.workspaces) == (0, 0, 0)
    assert report.memory.budget is None
    plain = report.to_dict()["memory"]
    assert json.loads(json.dumps(plain)) == plain
    assert plain["recordings"][0]["regions"][0]["copied_in"] == 4 * N
    for said in (str(report), report._repr_html_(), markdown.render(report)):
        assert f"Memory of the graphs: {units.size(arena.pool)} in 1 memory pool" in said
        assert "fn, compiled version 0, 3 replays: needs about 11.7 KiB of pool 0, and 7.8 KiB without graphs" in said
        assert "copied per call 3.9 KiB in, 3.9 KiB out" in said
    release(jitted)
    assert explain(jitted).memory == MemoryReport(previews=(preview,))
    said = (
        "fn, compiled version 0, forward, not captured: would need about 11.7 KiB of a pool, and 7.8 KiB without graphs"
    )
    assert str(explain(jitted)).splitlines()[-2:] == ["Memory of the graphs: none yet", f"  {said}"]


def test_training_and_functions_that_share_an_arena(backend, device):
    transform = cudagraph_transform(backend=backend, memory_budget=10**9)
    model = thunder.jit(nn.Sequential(Linear(8, 16), nn.Tanh(), Linear(16, 8)).to(device), transforms=[transform])
    jitted = thunder.jit(fn, transforms=[transform])
    x = torch.randn(4, 8, device=device)
    for _ in range(4):
        model(x).sum().backward()
        with torch.no_grad():
            jitted(model(x))
    memory = explain(model).memory
    assert memory.budget == 10**9
    assert [len(recording.regions) for recording in memory.recordings] == [2, 1]  # forward and backward, inference
    training, inference = memory.recordings
    forward, backward = training.regions
    assert backward.copied_out >= 4 * (8 * 16 + 16 * 8)  # the gradients of the weights
    assert training.without_graphs > max(inference.without_graphs, forward.without_graphs)
    assert {recording.arenas for recording in memory.recordings} == {(0,)}
    other = explain(jitted).memory
    assert memory.pools == other.pools == transform._shared.arenas.nbytes()  # one arena, which both have
    assert not memory.arenas[0].is_held
    y = model(x)
    assert explain(model).memory.arenas[0].is_held and ", in use by a call: a forward keeps it until" in str(
        explain(model)
    )
    del y


def test_text():
    graph = 5 << 20
    region = RegionMemory("CUDAGraph1", 1024, graph, 1024, 2048, 4096)
    recording = RecordingMemory("net", 1, (0, 2), 1234, 8192, 4096, (region, region))
    arena = ArenaMemory(0, 1 << 20, 32 << 20, False)
    report = MemoryReport((arena,), (recording,), (), 1 << 20, 32 << 20, 2 * graph, None)
    said = "Memory of the graphs: 1.0 MiB in 1 memory pool, 32.0 MiB in cuBLAS workspaces, 10.0 MiB in the driver"
    assert [*text.memory(report)] == [
        said,
        "  pool 0: 1.0 MiB",
        "  net, compiled version 1, 1,234 replays: needs about 8.0 KiB of pool 0 and 2, and 4.0 KiB without graphs; "
        "copies of inputs 2.0 KiB; in the driver 10.0 MiB; copied per call 2.0 KiB in, 4.0 KiB out",
    ]
    assert next(iter(text.memory(replace(report, budget=2 << 30)))).endswith("; memory_budget is 2.0 GiB")
