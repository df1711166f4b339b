"""`verify`: wrong operators are found and named, the call gets the eager result, and right ones stay captured."""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import thunder
import torch
from models import GPT, CachedAttention, Linear, ResNet, mlp
from support import fast_path_calls, on_threads, regions, replays, same, same_state, train
from thunder.core.proxies import TensorProxy
from thunder.core.transforms import get_grad, put_grad
from torch import nn

from thunder_cg import CaptureError, DisagreementWarning, explain
from thunder_cg.analysis import rules
from thunder_cg.report.programs import locate
from thunder_cg.runtime.program import Program
from thunder_cg.verify import ReplayVerifier
from thunder_cg.verify.compare import is_tolerable, same as same_bits
from thunder_cg.verify.hashes import CHUNK, hash_tensor
from thunder_cg.verify.trial import Trial

HERE = "test_verify.py"


class Planted:
    """Registers operators that are wrong in a graph: what ``fn`` reads on the host is frozen there."""

    def __init__(self) -> None:
        self.executor = thunder.extend.OperatorExecutor("planted")
        thunder.extend.register_executor(self.executor)
        self.jit = {"executors": [self.executor, *thunder.get_default_executors()]}
        self.names: list[str] = []

    def __call__(self, name: str, fn: Callable[..., Any], backward: Any = None, meta: Any = None) -> Any:
        op = self.executor.register_operator(name, fn=fn, meta=meta or (lambda x: TensorProxy(like=x)))

        def grad(x: Any) -> Any:
            y = op(x)
            put_grad(x, (backward or op)(get_grad(y)))
            return y

        if meta is None:
            self.executor.register_implementation(op, op, grad_transform=grad)
        self.names.append(name)
        return op


@pytest.fixture
def planted() -> Iterator[Planted]:
    made = Planted()
    yield made
    thunder.extend.deregister_executor(made.executor)


def plant_rule(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Adds a record of a planted operator: it only launches kernels."""
    rule = dataclasses.replace(rules.RULES["torch", "tanh"], key=("planted", name))
    monkeypatch.setattr(rules, "RULES", {**rules.RULES, rule.key: rule})


@contextmanager
def caught() -> Iterator[list[str]]:
    """The disagreements that were warned of."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in seen if w.category is DisagreementWarning]


def outcomes(model: Any, inputs: Any, *, backward: bool = False) -> list[Any]:
    """The result of each call, and the gradients of the parameters."""
    made = []
    for x in inputs:
        y = model(x)
        if backward:
            model.zero_grad()
            y.square().mean().backward()
        made.append(y.detach())
        made += [p.grad.clone() for p in model.parameters() if p.grad is not None] if backward else []
    return made


# -------------------------------------------------------------------------------------------- wrong operators are found


class Net(nn.Module):
    """An operator among a layer, dropout, statistics and a buffer that is written."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.first, self.norm, self.second = Linear(4, 4), nn.BatchNorm1d(4), Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.op = op

    def forward(self, x):
        self.calls.add_(1)
        y = nn.functional.dropout(torch.tanh(self.norm(self.first(x))), 0.5)
        return torch.cos(self.second(self.op(y))) * 2 + self.calls


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("verify", "at"), [(1, 5), (3, 7), (4, 5)])
@pytest.mark.nightly_after(1)
def test_a_python_variable_that_changes_later(planted, twins, device, training, verify, at):
    factor = [2.0]
    op = planted("scale", lambda x: x * factor[0])
    model = Net(op).requires_grad_(training)
    plain, graphed = twins(model, jit=planted.jit, allow=["scale"], verify=verify)
    seen_at = None
    for step in range(14):
        factor[0] = 2.0 if step < at else 3.0
        x = torch.randn(5, 4, device=device)
        with caught() as found:
            made = []
            for compiled in (plain, graphed):
                torch.manual_seed(step)
                made.append([*outcomes(compiled, [x], backward=training), torch.rand(2, device=device)])
        if found:
            assert seen_at is None, "a region is quarantined once"
            seen_at = step
            (message,) = found
            assert f"scale at {HERE}" in message and "deny=['scale']" in message
        if step < at or seen_at is not None:
            same(*made)
    assert seen_at is not None and at <= seen_at < at + verify, "one call in N is verified"
    for (_, one), (_, other) in zip(plain.named_buffers(), graphed.named_buffers()):
        same(one, other)
    assert int(plain.calls) == 14
    first = regions(graphed)[0]
    assert first["quarantined"] and "scale" in first["failure"] and first["eager_runs"] == 14 - seen_at
    assert "as verify= found its graph wrong: its graph disagrees with its ops" in str(explain(graphed))
    assert "found its graph wrong: its graph" in explain(graphed)._repr_html_()


@pytest.mark.parametrize("kind", ["a counter", "random numbers of its own"])
def test_a_wrong_rule_whose_first_replay_is_wrong(planted, transform, device, monkeypatch, kind):
    plant_rule(monkeypatch, "unsteady")
    ran: list[float] = []
    generator = random.Random(0)

    def fn(x):
        ran.append(len(ran) * 1e-6 if kind == "a counter" else generator.random())
        return x + ran[-1]

    op = planted("unsteady", fn)
    calls = Counter()

    def fn(x):
        return torch.cos(torch.tanh(x) * 2), op(x) * 1.0

    graphed = thunder.jit(fn, transforms=[transform(verify="first")], **planted.jit)
    for _ in range(5):
        x = torch.randn(3, 3, device=device)
        before = len(ran)
        with caught() as found:
            made = graphed(x)
        calls[bool(found)] += 1
        same(made[0], torch.cos(torch.tanh(x) * 2))
        assert any(torch.equal(made[1], x + used) for used in ran[before:]), "not what any eager run of the call gave"
    assert calls == {True: 1, False: 4}
    (region,) = regions(graphed)
    assert region["quarantined"] and f"unsteady at {HERE}" in region["failure"]
    assert "9 of 9 elements differ" in region["failure"] and "first at (0, 0)" in region["failure"]
    assert region["verified"] == 1
    (trace,), said = explain(graphed).traces, str(explain(graphed))
    assert trace.fallbacks == {"CUDAGraph1 disagrees with its ops": 4} and trace.awaiting_capture == 0
    assert "\nTo change that CUDAGraph1 disagrees with its ops: leave the operator eager with deny=['unsteady']" in said


def test_planted_in_the_backward(planted, twins, device):
    factor = [2.0]
    back = planted("scale_gradient", lambda x: x * factor[0])
    op = planted("scale", lambda x: x * 2.0, backward=back)
    plain, graphed = twins(
        nn.Sequential(Linear(4, 4), Through(op), Linear(4, 4)), jit=planted.jit, allow=planted.names, verify=2
    )
    messages = []
    for step in range(10):
        factor[0] = 2.0 if step < 6 else 5.0
        x = torch.randn(5, 4, device=device)
        with caught() as found:
            made = [outcomes(compiled, [x], backward=True) for compiled in (plain, graphed)]
        messages += found
        if step < 6 or found or step > 7:
            same(*made)
    (message,) = messages
    assert "scale_gradient" in message and "deny=['scale_gradient']" in message
    forward, backward = regions(graphed)
    assert backward["quarantined"] and not forward["quarantined"]
    assert forward["replays"] > backward["replays"]


class Through(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x):
        return torch.tanh(self.op(torch.sin(x)))


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.nightly_after(1)
def test_regions_after_it_see_the_eager_values(planted, twins, device, where):
    """Three regions with ``.item()`` between them, and the wrong operator in one."""
    factor = [2.0]
    wrong = planted("scale", lambda x: x * factor[0])
    right = planted("keep", lambda x: x * 1.0)
    ops = [wrong if i == where else right for i in range(3)]

    def fn(x, counts):
        counts.add_(1)
        for op in ops:
            x = torch.cos(op(torch.sin(x) + counts))
            x = x * x.sum().item()
            counts.mul_(0.5)
        return x * 2 + 1, x

    plain, graphed = twins(fn, jit=planted.jit, allow=planted.names, verify=1)
    counts = [torch.ones(4, device=device), torch.ones(4, device=device)]
    for step in range(8):
        factor[0] = 2.0 if step < 5 else 3.0
        x = torch.randn(4, device=device)
        versions = [c._version for c in counts]
        with caught() as found:
            same(plain(x, counts[0]), graphed(x, counts[1]))
        same(*counts)
        assert bool(found) == (step == 5)
        if step == 3:
            advanced = counts[1]._version - versions[1]
        elif step == 4:
            assert counts[1]._version - versions[1] == advanced
    assert sum(r["quarantined"] for r in regions(graphed)) == 1
    assert replays(graphed) > 3 * 4


def test_versions_are_those_of_an_unverified_replay(twins, device):
    def fn(x, y):
        y.add_(torch.sin(x) * 2)
        return torch.cos(y) * x

    advanced = {}
    for verify in (None, 1):
        _, graphed = twins(fn, verify=verify)
        y = torch.randn(4, device=device)
        seen = []
        for _ in range(4):
            before = y._version
            graphed(torch.randn(4, device=device), y)
            seen.append(y._version - before)
        advanced[verify] = seen[2:]
    assert advanced[1] == advanced[None] != [0, 0]


def test_every_recording_with_the_region_goes(planted, twins, device):
    factor = [2.0]
    op = planted("scale", lambda x: x * factor[0])
    plain, graphed = twins(Through(op), jit=planted.jit | {"cache": "constant values"}, allow=["scale"], verify=3)
    inputs = [torch.randn(4, 4, device=device), torch.randn(4, 4, device=device).t()]
    for _ in range(3):
        for x in inputs:
            same(plain(x), graphed(x))
    assert len(program(graphed).pair.recordings) == 2
    factor[0] = 3.0
    with caught() as found:
        for _ in range(3):
            for x in inputs:
                graphed(x)
    assert len(found) == 1
    for x in inputs:
        same(plain(x), graphed(x))


def program(jitted: Any) -> Program:
    """The program of the only forward."""
    return locate(jitted).programs[0].program


def test_forwards_in_flight(planted, twins, device):
    """Their backwards must not replay a graph that has been quarantined meanwhile."""
    factor = [2.0]
    back = planted("scale_gradient", lambda x: x * factor[0])
    op = planted("scale", lambda x: x * 2.0, backward=back)
    plain, graphed = twins(nn.Sequential(Linear(4, 4), Through(op)), jit=planted.jit, allow=planted.names, verify=5)
    for _ in range(6):
        x = torch.randn(3, 2, 4, device=device)
        for compiled in (plain, graphed):
            for loss in [compiled(xi).sum() for xi in x]:
                loss.backward()
    same_state(plain, graphed)
    factor[0] = 3.0
    warned = False
    for _ in range(4):
        x = torch.randn(3, 2, 4, device=device)
        losses = [[compiled(xi).sum() for xi in x] for compiled in (plain, graphed)]
        for one, other in zip(*losses):
            for compiled in (plain, graphed):
                compiled.zero_grad()
            one.backward()
            with caught() as found:
                other.backward()
            warned |= bool(found)
            if warned:
                same_state(plain, graphed)
    assert warned


def test_strict_raises(planted, transform, device):
    factor = [2.0]
    op = planted("scale", lambda x: x * factor[0])
    graphed = thunder.jit(Through(op), transforms=[transform(allow=["scale"], verify=2, strict=True)], **planted.jit)
    x = torch.randn(4, 4, device=device)
    for _ in range(4):
        graphed(x)
    factor[0] = 3.0
    with pytest.raises(CaptureError, match=rf"CUDAGraph\d+: its graph disagrees.*scale at {HERE}.*deny=\['scale'\]"):
        graphed(x), graphed(x)
    with pytest.raises(CaptureError, match="its graph disagrees"):
        graphed(x)


def test_a_write_that_nothing_says(planted, twins, device, monkeypatch):
    """A wrong record. An operator without one is assumed to write its arguments."""
    plant_rule(monkeypatch, "advance")
    op = planted("advance", lambda x: x.add_(1.0) * 2.0)
    counts = [torch.zeros(4, device=device), torch.zeros(4, device=device)]

    def fn(x, count):
        return torch.tanh(x) * 2 + op(count)

    plain, graphed = twins(fn, jit=planted.jit, verify="first")
    messages = []
    for _ in range(5):
        x = torch.randn(4, device=device)
        with caught() as found:
            same(plain(x, counts[0]), graphed(x, counts[1]))
        messages += found
        same(*counts)
    (message,) = messages
    assert "input 'count' is written by an operator that does not say so" in message and "advance" in message


def test_an_operator_that_raises_where_a_graph_cannot(planted, twins, device):
    broken = [False]

    def fn(x):
        if broken[0]:
            raise ValueError("broken")
        return x * 2

    op = planted("brittle", fn)
    _, graphed = twins(Through(op), jit=planted.jit, allow=["brittle"], verify=1)
    x = torch.randn(4, device=device)
    for _ in range(3):
        graphed(x)
    broken[0] = True
    with caught(), pytest.raises(ValueError, match="broken"):
        graphed(x)
    broken[0] = False
    same(graphed(x), torch.tanh(torch.sin(x) * 2))
    (region,) = regions(graphed)
    assert region["quarantined"] and "broken" in region["failure"]


def test_memory_that_an_operator_keeps(planted, twins, device):
    """The eager run's result is overwritten by the replay."""
    factor, out = [2.0], torch.empty(3, 4, device=device)
    op = planted("scale", lambda x: torch.mul(x, factor[0], out=out))
    _, graphed = twins(lambda x: (op(torch.sin(x) * 1.5), x[0]), jit=planted.jit, allow=["scale"], verify=1)
    for step in range(6):
        factor[0] = 2.0 if step < 4 else 3.0
        x = torch.randn(3, 4, device=device)
        with caught() as found:
            made, view = graphed(x)
        same(made.clone(), torch.sin(x) * 1.5 * factor[0])
        assert bool(found) == (step == 4) and all(f"scale at {HERE}" in message for message in found)
        assert view.data_ptr() == x.data_ptr()


def test_draws_on_the_host_are_those_of_one_run(planted, twins, device):
    factor = [2.0]
    op = planted("scale", lambda x: (torch.rand(2), x * factor[0])[1])
    plain, graphed = twins(Through(op), jit=planted.jit, allow=["scale"], verify=1)
    for step in range(6):
        factor[0] = 2.0 if step < 4 else 3.0
        x = torch.randn(4, 4, device=device)
        made = []
        with caught() as found:
            for compiled in (plain, graphed):
                torch.manual_seed(step)
                made.append([compiled(x), torch.rand(2), torch.rand(2, device=device)])
        assert bool(found) == (step == 4)
        if step > 1:  # a capture runs Python as often as it needs to
            same(*made)


@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("at_first", [False, True], ids=["a copy", "the input"])
@pytest.mark.nightly_after(2)
def test_memory_that_results_share_with_inputs(planted, twins, device, at_first, written):
    shares = [at_first]
    op = planted("perhaps", lambda x: x if shares[0] else x.clone())

    def fn(x):
        if written:
            x.add_(1)
        return op(x), torch.sin(x) * 2

    plain, graphed = twins(fn, jit=planted.jit, allow=["perhaps"], verify=1)
    x, y = (torch.empty(4, device=device) for _ in range(2))
    for step in range(6):
        shares[0] = at_first == (step < 4)
        for each in (x, y):
            each.copy_(torch.arange(4.0))
        with caught() as found:
            made, mine = plain(x), graphed(y)
        same(made, mine)
        assert bool(found) == (step == 4)
        made[0].add_(1), mine[0].add_(1)
        same(x, y)
    (region,) = regions(graphed)
    assert "memory of its own" in region["failure"] and f"perhaps at {HERE}" in region["failure"]


@pytest.mark.parametrize("how", ["a write", "an integer", "strides", "order"])
@pytest.mark.nightly_after(2)
def test_the_operator_to_blame(planted, twins, device, how):
    """A later op that reads its result, or what it writes, is not blamed."""
    factor = [0]

    def write(x, y):
        y.mul_(1.0 + factor[0])
        return x * 1.0

    def index(x):
        return x * 2.0, torch.full((3,), factor[0], dtype=torch.int64, device=x.device)

    def two(x):
        return TensorProxy(like=x), TensorProxy(like=x, shape=(3,), dtype=thunder.dtypes.int64)

    wrong = planted(
        "wrong",
        {
            "a write": write,
            "an integer": index,
            "strides": lambda x: x.t().contiguous().t() if factor[0] else x * 1.0,
            "order": lambda x: x.flip(0) if factor[0] else x * 1.0,
        }[how],
        meta={"an integer": two, "a write": lambda x, y: TensorProxy(like=x)}.get(how),
    )

    def fn(x):
        if how == "a write":
            y = torch.sin(x)
            return wrong(x, y) * 2, torch.cos(y)
        if how == "an integer":
            values, at = wrong(torch.sin(x))
            return torch.gather(values.view(-1), 0, at) * 1.5
        made = wrong(torch.abs(x))
        return torch.cumsum(made, 0) * 2 if how == "order" else torch.sin(made) * 2

    plain, graphed = twins(fn, jit=planted.jit, allow=["wrong"], verify=1)
    x = torch.eye(2, device=device) if how == "order" else torch.randn(3, 4, device=device)
    for step in range(5):
        factor[0] = int(step > 2)
        with caught() as found:
            same(plain(x), graphed(x))
        assert bool(found) == (step == 3)
        assert all(f"made by wrong at {HERE}" in message and "deny=['wrong']" in message for message in found)


def test_an_operator_that_is_wrong_now_and_then_is_to_blame(planted, transform, device):
    """Not the one that makes the result: in the first run for hashes, there is nothing to see."""
    calls = [0]

    def seldom(x):
        calls[0] += 1
        return x * (3.0 if calls[0] in (1, 9) else 1.0)

    op = planted("seldom", seldom)
    jitted = thunder.jit(
        lambda x: torch.cos(op(torch.sin(x))) * 2, transforms=[transform(allow=["seldom"], verify=1)], **planted.jit
    )
    with caught() as found:
        for _ in range(2):
            calls[0] = 10
            jitted(torch.ones(3, device=device))
        calls[0] = 0
        jitted(torch.ones(3, device=device))
    (said,) = found
    assert f"made by seldom at {HERE}" in said and calls[0] > 8


# ------------------------------------------------------------------------------------------------------ right ones stay


def tokens(device, rows=2, length=8):
    return torch.randint(0, 64, (rows, length), device=device)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (mlp, lambda d: (torch.randn(4, 16, device=d),)),
        pytest.param(lambda: GPT(layers=1, dropout=0.2), lambda d: (tokens(d), tokens(d)), marks=pytest.mark.nightly),
        pytest.param(lambda: ResNet(4), lambda d: (torch.randn(2, 3, 8, 8, device=d),), marks=pytest.mark.nightly),
    ],
    ids=["mlp", "gpt", "resnet"],
)
def test_right_models_train_on(transform, device, deterministic, model, batch):
    """One that is compiled without graphs, which takes seconds, is what both are compared with."""
    original = model().to(device)
    batches = [batch(device) for _ in range(6)]
    plain = thunder.jit(copy.deepcopy(original))
    losses = train(plain, batches)
    for verify, verified in (("first", 1), (1, 5)):
        graphed = thunder.jit(copy.deepcopy(original), transforms=[transform(verify=verify)])
        same(losses, train(graphed, batches))
        same_state(plain, graphed)
        for region in regions(graphed):
            assert not region["quarantined"] and region["remark"] is None
            assert region["replays"] == 5 and region["verified"] == verified


@pytest.mark.parametrize("verify", ["first", 1])
@pytest.mark.nightly_after(1)
def test_right_inference_with_state(twins, device, deterministic, verify):
    plain, graphed = twins(CachedAttention().requires_grad_(False), verify=verify)
    for position in range(8):
        x, at = torch.randn(1, 1, 16, device=device), torch.tensor([position], device=device)
        same(plain(x, at), graphed(x, at))
        same_state(plain, graphed)
    assert replays(graphed) == 7 and not regions(graphed)[0]["quarantined"]


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_one_call_in_n_goes_through_thunders_dispatch(twins, device, training):
    plain, graphed = twins(mlp().requires_grad_(training), verify=4)
    inputs = [torch.randn(4, 16, device=device) for _ in range(18)]
    same(outcomes(plain, inputs, backward=training), outcomes(graphed, inputs, backward=training))
    for region in regions(graphed):  # calls 2, 6, 10, 14 and 18
        assert (region["captures"], region["replays"], region["verified"]) == (1, 17, 5)
    assert fast_path_calls(graphed) == 12
    assert "5 verified" in str(explain(graphed))


@pytest.mark.nightly
def test_gradients_still_go_in_bulk(twins, device):
    """A verified call goes through Thunder's dispatch, which must not exhaust what accumulates gradients in bulk."""
    _, graphed = twins(mlp(1), verify=2)
    outcomes(graphed, [torch.randn(4, 16, device=device) for _ in range(200)], backward=True)
    (entry,) = graphed._forward_fn._certain()
    ((_, path),) = entry._recorded
    x = torch.randn(4, 16, device=device)
    graphed(x)
    kept = path._keeper._kept
    assert kept is None or kept._may_deliver


def test_off_costs_nothing(twins, device, monkeypatch):
    """Nothing is recorded for a comparison, none takes place, and the fast path compares two integers."""
    for hook in ("record", "replay"):
        monkeypatch.setattr(ReplayVerifier, hook, lambda *args: pytest.fail("a hook was called"))
    _, graphed = twins(mlp().requires_grad_(False))
    for _ in range(4):
        graphed(torch.randn(4, 16, device=device))
    (recording,) = program(graphed).pair.recordings
    assert program(graphed).regions[0].hash_function is None and recording.forward.graphs[0].check is None
    (call,) = graphed._forward_fn._calls
    names = {*call.__code__.co_names, *call.__code__.co_varnames, *call.__code__.co_freevars}
    assert {name for name in names if "verif" in name} == {"verify_after"}
    assert program(graphed).verify_after == sys.maxsize
    assert fast_path_calls(graphed) == 2


def test_under_hooks_there_is_nothing_to_verify(twins, device):
    plain, graphed = twins(mlp(), verify=1)
    x = torch.randn(4, 16, device=device)
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu():
            same(plain(x).detach(), graphed(x).detach())
    assert [region["verified"] for region in regions(graphed)[:1]] == [0]


@pytest.mark.parametrize("step", ["__init__", "run"])
@pytest.mark.nightly_after(1)
def test_out_of_memory_costs_no_call(twins, device, monkeypatch, step):
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(Trial, step, fails)
    plain, graphed = twins(MLPWithDropout(), verify=1)
    for seed in range(4):
        x = torch.randn(4, 8, device=device)
        made = []
        for compiled in (plain, graphed):
            torch.manual_seed(seed)
            made.append([*outcomes(compiled, [x], backward=True), torch.rand(2, device=device)])
        same(*made)
    forward, _ = regions(graphed)
    assert forward["verified"] == 0 and forward["replays"] == 3 and not forward["quarantined"]
    assert "in verification: not verified: OutOfMemoryError: planted" in str(explain(graphed))


@contextmanager
def drawing(monkeypatch: pytest.MonkeyPatch, device: str, step: str, times: int) -> Iterator[list[float]]:
    """Another thread draws after some of these steps of trials. Yields the numbers that it drew."""
    drawn: list[float] = []
    original = getattr(Trial, step)

    def draw() -> None:
        drawn.append(torch.rand((), dtype=torch.float64, device=device).item())

    def stepped(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if len(drawn) < times:
            on_threads(draw)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(Trial, step, stepped)
        yield drawn


@pytest.mark.parametrize("step", ["__init__", "run", "replay"])
@pytest.mark.nightly_after(2)
def test_a_region_that_draws_nothing_leaves_generators_alone(twins, device, monkeypatch, step):
    plain, graphed = twins(lambda x: torch.tanh(torch.sin(x) + 1) * 2, verify=1)
    for on in {"cpu", device}:
        x = torch.randn(4, device=device)
        graphed(x)
        torch.manual_seed(1)
        with drawing(monkeypatch, on, step, sys.maxsize) as drawn:
            for _ in range(4):
                same(plain(x), graphed(x))
        torch.manual_seed(1)
        assert drawn == [torch.rand((), dtype=torch.float64, device=on).item() for _ in drawn] and len(drawn) > 2
    (region,) = regions(graphed)
    assert not region["quarantined"] and region["remark"] is None


@pytest.mark.parametrize("verify", ["first", 1])
def test_captures_that_draw_nothing_leave_the_generator_alone(twins, device, monkeypatch, verify):
    _, graphed = twins(lambda x: torch.tanh(torch.sin(x) + 1) * 2, verify=verify)
    state: list[Any] = []
    monkeypatch.setattr(torch, "set_rng_state", state.append)
    for _ in range(4):
        graphed(torch.randn(4, device=device))
    assert not state and regions(graphed)[0]["verified"] == {"first": 1, 1: 3}[verify]


@pytest.mark.parametrize(("step", "times"), [("__init__", 1), ("run", 1), ("run", 7), ("replay", 1), ("replay", 7)])
@pytest.mark.nightly_after(2)
def test_draws_of_another_thread_are_no_disagreement(twins, device, monkeypatch, step, times):
    _, graphed = twins(lambda x: nn.functional.dropout(torch.sin(x) * 2, 0.5) * 3, verify=1)
    x = torch.ones(1000, device=device)
    for _ in range(3):
        graphed(x)
    with caught() as found, drawing(monkeypatch, device, step, times) as drawn:
        made = [graphed(x) for _ in range(3)]
    assert not found and drawn and len(set(drawn)) == len(drawn)
    assert len({tuple(m.tolist()) for m in made}) == 3
    (region,) = regions(graphed)
    assert not region["quarantined"] and region["replays"] == 5


def test_a_trial_that_others_disturb_is_no_comparison(twins, device, monkeypatch):
    _, graphed = twins(lambda x: nn.functional.dropout(torch.sin(x) * 2, 0.5) * 3, verify=1)
    x = torch.ones(1000, device=device)
    for _ in range(3):
        graphed(x)
    with drawing(monkeypatch, device, "run", 1):
        graphed(x)
    (region,) = regions(graphed)
    assert region["verified"] == 2 and region["replays"] == 3
    assert f"not verified: another thread changed the state of the {device}" in region["remark"]


def test_a_wrong_operator_is_caught_though_others_draw_now_and_then(planted, twins, device, monkeypatch):
    factor = [2.0]
    op = planted("scale", lambda x: x * factor[0])
    _, graphed = twins(MLPWithDropout(op), jit=planted.jit, allow=["scale"], verify=1)
    messages = []
    for step in range(6):
        factor[0] = 2.0 if step < 3 else 3.0
        with caught() as found, drawing(monkeypatch, device, "run", int(step in (2, 3))):
            graphed(torch.randn(4, 8, device=device))
        messages += [(step, message) for message in found]
    ((step, message),) = messages
    assert step == 4 and f"scale at {HERE}" in message


def test_dropout_on_two_threads(twins, device):
    """Trials that draw exclude each other, and other draws of the other thread are no disagreement."""
    models = [twins(lambda x: nn.functional.dropout(torch.sin(x) * 2, 0.5) * 3, verify=1)[1] for _ in range(2)]

    def work(model: Any) -> None:
        for _ in range(30):
            model(torch.ones(5000, device=device))

    with caught() as found:
        on_threads(*(partial(work, model) for model in models))
    assert not found
    assert not any(region["quarantined"] for model in models for region in regions(model))


class MLPWithDropout(nn.Module):
    def __init__(self, op: Any = torch.tanh) -> None:
        super().__init__()
        self.layer, self.op = Linear(8, 8), op

    def forward(self, x):
        return torch.sin(nn.functional.dropout(self.op(self.layer(x)), 0.5))


# ------------------------------------------------------------------------------------------------ tolerated differences


@pytest.fixture
def unsteady_sum() -> Iterator[Any]:
    """An operator that sums rows in another order at each run and each replay, as atomic additions do."""
    library = torch.library.Library("thunder_cg_tests", "DEF")
    library.define("unsteady_sum(Tensor x) -> Tensor")
    order = random.Random(0)

    def unsteady_sum(x):
        rows = list(range(x.shape[0]))
        order.shuffle(rows)
        total = torch.zeros_like(x[0])
        for row in rows:
            total = total + x[row]
        return total.expand_as(x).contiguous()

    library.impl("unsteady_sum", unsteady_sum, "CPU")
    yield torch.ops.thunder_cg_tests.unsteady_sum
    library._destroy()


def test_kernels_that_are_not_deterministic_on_tape(planted, transform, unsteady_sum, backend):
    if backend != "tape":
        pytest.skip("a graph has no Python that could shuffle")
    op = planted("unsteady_sum", unsteady_sum)
    graphed = thunder.jit(Through(op), transforms=[transform(allow=planted.names, verify=1)], **planted.jit)
    for _ in range(6):
        x = torch.randn(64, 16)
        torch.testing.assert_close(graphed(x), torch.tanh(torch.sin(x).sum(0).expand_as(x)))
    (region,) = regions(graphed)
    assert not region["quarantined"] and region["verified"] == 5
    assert "is not deterministic" in region["remark"]
    assert "in verification: the result of torch.tanh at test_verify.py:" in str(explain(graphed))


def test_kernels_that_are_not_deterministic_on_cuda(twins, backend, device):
    if backend != "cuda":
        pytest.skip("the CPU adds in order")

    def fn(x, index):
        return torch.sin(torch.zeros(4, 64, device=x.device).index_add(0, index, x * 0.01)) * 2

    _, graphed = twins(fn, verify=1)
    for _ in range(8):
        x, index = torch.randn(20_000, 64, device=device), torch.randint(0, 4, (20_000,), device=device)
        graphed(x, index)
    (region,) = regions(graphed)
    assert not region["quarantined"] and region["verified"] == 7
    assert region["remark"] is None or "is not deterministic" in region["remark"]


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.nightly), torch.float16], ids=str)
def test_attention_is_right(twins, backend, device, dtype):
    """Without dropout its kernels return seeds that they never wrote, and some of them add atomically."""
    if backend == "tape" and dtype is torch.float16:
        pytest.skip("the CPU has the same kernels for both")
    plain, graphed = twins(GPT(layers=1, heads=2).to(dtype), verify=1)
    batches = [(tokens(device, 2, 16),) for _ in range(6)]
    with caught() as found:
        for batch in batches:
            for compiled in (plain, graphed):
                compiled.zero_grad()
                compiled(*batch).float().square().mean().backward()
    assert not found and not any(region["quarantined"] for region in regions(graphed))
    assert all(region["verified"] == 5 for region in regions(graphed))


def test_memory_that_nobody_writes(twins, device):
    _, graphed = twins(lambda x: (torch.zeros(4, device=x.device) + x, torch.empty_like(x)), verify=1)
    for _ in range(5):
        x = torch.randn(4, device=device)
        with caught() as found:
            made, _ = graphed(x)
        same(made, x)
        assert not found
    (region,) = regions(graphed)
    assert not region["quarantined"] and region["verified"] == 4


def test_tolerance():
    base = torch.randn(1000, dtype=torch.float64).float()
    noise = [base + torch.randn(1000) * 1e-6 for _ in range(10)]
    assert is_tolerable(noise[:5], noise[5:], None)
    assert not is_tolerable(noise[:5], [noise[5]] * 5, None), "the graph is frozen"
    assert not is_tolerable([noise[0]] * 5, noise[5:], None), "the ops are deterministic"
    assert not is_tolerable(noise[:5], [n + 1e-3 for n in noise[5:]], None), "far beyond the spread"
    wild = [base + torch.randn(1000) for _ in range(10)]
    assert not is_tolerable(wild[:5], wild[5:], None), "no rounding"
    holes = [n.clone() for n in noise]
    holes[5][3] = float("nan")
    assert not is_tolerable(holes[:5], holes[5:], None)
    whole = [torch.arange(10) + i for i in range(10)]
    assert not is_tolerable(whole[:5], whole[5:], None), "integers are exact"
    garbage = [torch.tensor([7.0, float(i)]) for i in range(10)]
    assert is_tolerable(garbage[:5], garbage[5:], torch.tensor([False, True]))
    assert not is_tolerable(garbage[:5], garbage[5:], torch.tensor([True, False]))
    filled, unwritten = torch.full((2,), -1, dtype=torch.int32).view(torch.float32), torch.tensor([True, True])
    assert is_tolerable([filled, *garbage[:4]], garbage[5:], unwritten), "freed memory is filled with ones"
    assert not is_tolerable([filled] * 5, garbage[5:], unwritten), "the ops write ones"


def test_bits():
    nan = torch.tensor([float("nan")])
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same_bits(nan, nan.clone()) and not same_bits(nan, other)
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.zeros(0, 3), torch.zeros(0, 3)) and not same_bits(torch.zeros(2, 3), torch.zeros(3, 2).t())
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        t = torch.arange(6).reshape(2, 3).to(dtype)
        assert same_bits(t, t.clone()) and same_bits(t.conj(), t.conj())


@pytest.mark.nightly
def test_value_hashes():
    t = torch.randn(3, 4, 5)
    assert int(hash_tensor(t)) == int(hash_tensor(t.clone())) == int(hash_tensor(t.t_().t() if t.dim() < 3 else t))
    for other in (
        t.roll(1, 0),
        t.roll(1, 1),
        t.roll(1, 2),
        t.flip(2),
        -t,
        t.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        assert int(hash_tensor(other)) != int(hash_tensor(t))
    assert int(hash_tensor(torch.eye(2))) != int(hash_tensor(torch.eye(2).flip(0)))
    expanded = torch.randn(3, 1).expand(3, 4)
    assert int(hash_tensor(expanded)) != int(hash_tensor(expanded.flip(0)[:, :1].expand(3, 4)))
    long = torch.randn(3 * CHUNK + 1)
    for at in (0, 1):
        assert int(hash_tensor(long)) != int(hash_tensor(long.roll(CHUNK + at)))
    for t in (torch.tensor(3.0), torch.zeros(0), torch.randn(2, dtype=torch.complex128).conj(), torch.ones(2) > 0):
        assert isinstance(int(hash_tensor(t)), int)


def test_captures_are_verified_however_rare_samples_are(twins, device):
    _, graphed = twins(mlp(), verify=sys.maxsize)
    for _ in range(4):
        graphed(torch.randn(4, 16, device=device)).sum().backward()
    assert [region["verified"] for region in regions(graphed)] == [1, 1]
