"""The ledger of a graphed step, and its memory budget."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import partial
from weakref import WeakKeyDictionary

import jsonschema
import pytest
import torch
from support import programs, same, same_state, usual_step
from torch.nn.functional import cross_entropy

from thunder_cg import explain, release
from thunder_cg.report import MemoryPreview, MemoryReport, StepReport, schema, text, units
from thunder_cg.runtime.tape import TapeBackend, TapePool

GRADIENTS = 4 * (4 * 8 + 8 + 8 * 3 + 3)  # bytes
BATCH = 5 * 4 * 4 + 5 * 8  # of five samples


make = partial(usual_step, make=partial(torch.optim.SGD, lr=0.1))


@pytest.fixture
def step_of(step_twins):
    """A new model that is not compiled, and its graphed step."""

    def new(**options):
        model = step_twins.model()
        return model, step_twins.graphed(make(model), **options)

    return new


def call(twins, step, size=5, times=1):
    for _ in range(times):
        step(*twins.batch(size))


def test_a_ledger_to_the_byte(step_twins, step_of, tmp_path, backend):
    _, step = step_of()
    assert explain(step).memory == MemoryReport()
    call(step_twins, step)
    (preview,) = explain(step).memory.previews
    assert preview.without_graphs >= GRADIENTS and preview.needs == BATCH + preview.without_graphs
    if backend == "tape":  # which knows no peak
        assert preview == MemoryPreview("step", 0, "step", BATCH + GRADIENTS, GRADIENTS)
    call(step_twins, step, times=4)
    report = explain(step)
    (arena,), (recording,) = report.memory.arenas, report.memory.recordings
    assert report.memory.pools == arena.pool == step.arena.nbytes() > BATCH + GRADIENTS
    assert not arena.is_held and report.memory.budget is None and report.memory.previews == ()
    assert (recording.function, recording.entry, recording.arenas, recording.replays) == ("step", 0, (0,), 3)
    assert recording.gradients == GRADIENTS
    assert (recording.needs, recording.without_graphs) == (preview.needs, preview.without_graphs)
    (region,) = recording.regions
    assert (region.copied_in, region.static_buffers, region.copied_out) == (BATCH, BATCH, 4)  # the loss
    (kinds,) = report.nodes
    assert f"Graph 0: {kinds['op']} ops" in str(report) if backend == "tape" else kinds["kernel"] > 0
    assert report.memory.graphs == region.graph and (backend == "cuda" or region.graph == 0)

    said = f"step, graph 0, 3 replays: needs at least {units.size(preview.needs)} of pool 0, and "
    for suffix in (".html", ".md", ".json", ".txt"):
        report.save(path := tmp_path / f"step{suffix}")
        content = " ".join(path.read_text(encoding="utf-8").split())
        assert suffix == ".json" or (said in content and "gradients 268 B; copies of inputs 120 B" in content), content
    saved = tmp_path / "step.json"
    assert StepReport.load(saved) == report
    jsonschema.validate(json.loads(saved.read_text(encoding="utf-8")), schema.schema(StepReport))
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert said in str(report) and said in report._repr_html_()

    release(step)
    assert explain(step).memory == MemoryReport(previews=(preview,))
    assert "Memory" not in str(explain(step))
    said = f"  step, layout 0 of the batch, not captured: would need at least {units.size(preview.needs)}"
    lines = [*text.memory(MemoryReport(previews=(preview,), budget=1), of_step=True)]
    assert lines[0] == "Memory of the graphs: none yet; memory_budget is 1 B" and lines[1].startswith(said)


def test_the_peak_of_a_call_in_python_says_what_it_needs(step_twins, step_of, monkeypatch):
    if step_twins.backend == "cuda":
        pytest.skip("the statistics are PyTorch's own there")
    _, step = step_of()
    counted = iter([(1000, 1500), (1200, 2100), (1200, 2100), (1200, 3000), (1200, 3000), (1200, 3000)])
    monkeypatch.setattr(TapeBackend, "allocated_nbytes", lambda self, device: next(counted))
    for size in (5, 3, 4):
        call(step_twins, step, size)
    needs = [preview.without_graphs for preview in explain(step).memory.previews]
    # The second call has freed the gradients of the first one. The third has not raised the peak.
    assert needs == [1100, 1800 + GRADIENTS, GRADIENTS]

    model = step_twins.model()

    def last_of_several(x, y):
        cross_entropy(model(x), y).backward()
        model.zero_grad()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = step_twins.graphed(last_of_several)
    counted = iter([(1200, 3000), (1200, 4000)])
    call(step_twins, step)
    assert [preview.without_graphs for preview in explain(step).memory.previews] == [2800]


def test_what_cannot_fit_is_not_tried(step_twins, monkeypatch):
    if step_twins.backend == "tape":
        monkeypatch.setattr(TapePool, "capture", None)
    with pytest.warns(UserWarning, match=r"graphed_step\(step\) runs in Python.*; raise memory_budget"):
        step = step_twins.train(make, memory_budget=300)
    needs = explain(step).memory.previews[0].needs
    assert (step.captures, step.replays) == (0, 0) and needs >= BATCH + GRADIENTS
    reason = f"memory_budget is 300 bytes, and its graphs need about {needs:,} bytes; raise memory_budget"
    assert step.in_python[reason] == 7
    assert explain(step).memory.budget == 300 and "; memory_budget is 300 B" in str(explain(step))


def test_a_pool_that_came_out_larger_is_given_back(step_twins):
    """388 bytes are known to be needed. The tape needs more, as it keeps what every operator has made."""
    with pytest.warns(UserWarning, match="raise memory_budget"):
        step = step_twins.train(make, memory_budget=500)
    memory = explain(step).memory
    (preview,) = memory.previews
    assert step.captures == 0 and preview.needs > 500 and preview.without_graphs >= GRADIENTS
    if step_twins.backend == "tape":
        reason = f"memory_budget is 500 bytes, and its memory pool has come to {preview.needs:,} bytes"
        assert step.in_python[f"{reason}; raise memory_budget"] == 7
    assert (memory.arenas, memory.pools, step._arenas.nbytes()) == ((), 0, 0)


def keep_until_all_is_free(monkeypatch):
    """As a pool on a GPU does: it becomes smaller only when no graph uses it any more."""
    most = WeakKeyDictionary()
    nbytes = TapePool.nbytes

    def sticky(pool):
        found = nbytes(pool)
        most[pool] = max(found, most.get(pool, 0)) if found else 0
        return most[pool]

    monkeypatch.setattr(TapePool, "nbytes", sticky)


@pytest.mark.parametrize("sticky", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_older_graphs_go_first(sticky, step_twins, step_of, monkeypatch):
    if step_twins.backend == "cuda":
        pytest.skip("what a pool on a GPU takes is known in tests/gpu only")
    _, trial = step_of()
    call(step_twins, trial, 5, 3)
    budget = trial.arena.nbytes() + 100  # the step of two samples needs less
    if sticky:
        keep_until_all_is_free(monkeypatch)

    model, step = step_of(memory_budget=budget)
    twin = step_twins.model()
    plain = make(twin)
    sizes = [5] * 6 + [2] * 6 + [5] * 4
    torch.manual_seed(3)
    expected = [plain(*step_twins.batch(size)).detach() for size in sizes]
    torch.manual_seed(3)
    found = []
    for size in sizes:
        found.append(step(*step_twins.batch(size)))
        assert explain(step).memory.pools <= budget
        assert len(step.recordings) <= 1
    same(found, expected)
    same_state(model, twin)
    assert step.captures == 3 and step.replays >= 8, step.in_python  # the step of five samples is captured twice
    for_memory = sum(times for reason, times in step.in_python.items() if "memory_budget" in reason)
    assert for_memory == 2 * sticky, step.in_python  # where the pool stays large, the next call has all of it


def test_a_share_of_the_device(step_twins, step_of):
    _, step = step_of(memory_budget=0.25)
    if step_twins.backend == "tape":
        assert step.budget() == explain(step).memory.budget == TapeBackend().device_nbytes(torch.device("cpu")) // 4
    call(step_twins, step, times=4)
    assert step.replays == 2, step.in_python


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_the_state_of_an_optimizer_is_made_apart(step_twins, backend, monkeypatch, kind):
    """In one pool, and nothing else with it. SGD makes its state elsewhere."""
    options = {"fused": True, "capturable": backend == "cuda"} if kind == "AdamW" else {"lr": 0.1, "momentum": 0.9}
    function = usual_step(step_twins.model(), make=partial(getattr(torch.optim, kind), **options))
    step, made = step_twins.graphed(function), []
    owner = type(step._backend)
    real = owner.memory_apart

    @contextmanager
    def memory_apart(self):
        with real(self) as apart:

            @contextmanager
            def inside():
                with apart():
                    yield
                made.append(sum(map(len, function.optimizer.state.values())))

            yield inside

    monkeypatch.setattr(owner, "memory_apart", memory_apart)
    call(step_twins, step, times=5)
    assert made == ([4 * 3] if kind == "AdamW" else [0])
    assert step.replays and "_init_group" not in vars(function.optimizer)


def test_graphs_of_the_modules_take_no_memory_before_the_step_is_captured(step_twins):
    found = []

    def make(compiled):
        found.append(compiled)
        sgd = torch.optim.SGD(compiled.parameters(), lr=0.1)

        def step(x, y):
            loss = cross_entropy(compiled(x), y)
            loss.backward()
            return loss

        def update(i):
            if i % 3 == 2:
                sgd.step()
                sgd.zero_grad()

        step.update = update
        return step

    step = step_twins.train(make, 16, between=lambda i, compiled, fn, batch: fn.update(i))
    assert step.replays >= 10
    assert not any(program.counts.warm_ups for program in programs(found[1])) and explain(found[1]).memory.pools == 0
