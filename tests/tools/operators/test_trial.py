"""trial: what is captured wrongly is seen, and what is captured rightly passes."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from thunder_cg.tools.operators.cases import cases
from thunder_cg.tools.operators.measure import OperatorRecord, OperatorTask, _CaseMeasurement, label, measure
from thunder_cg.tools.operators.samples import DRAWS, OperatorCase, Sample, SampledCall, calls, twins
from thunder_cg.tools.operators.trial import CaptureTrial, NotTraced, attempt, capture_alone, verdict


def made(fn, *shapes: tuple[int, ...], device: str, grad: bool = False) -> list[SampledCall]:
    def draw(device: str, grad: bool):
        yield Sample(fn, tuple(torch.randn(shape, device=device).requires_grad_(grad) for shape in shapes))

    return calls(OperatorCase("made", draw), device, grad) * 2


def test_a_right_capture_passes(device):
    trial = attempt(made(lambda x, y: x * y + 1, (3, 4), (4,), device=device), device, False)
    assert trial.verdicts == ["pass", "pass"] and trial.clean
    assert trial.captured["forward"] == {("torch", "mul"): 2, ("torch", "add"): 2}


def test_the_backward_is_captured_too(device):
    trial = attempt(made(torch.sigmoid, (3, 4), device=device, grad=True), device, True)
    assert trial.clean and ("torch", "mul") in trial.captured["backward"]


def test_a_number_of_an_address_is_wrong_by_force(device):
    some = made(lambda x: x.data_ptr() * 2, (3, 4), device=device)
    assert attempt(some, device, False).eager
    # Thunder knows what it returns for a number, so that force is of no use; the kernel itself is captured, and wrong.
    outcome = capture_alone(some[0], device, False)
    assert outcome is not None and outcome[0] == "wrong"


def test_a_host_sync_fails_by_force(device):
    some = made(lambda x: torch.linalg.cond(x @ x.T), (4, 4), device=device)
    trial = attempt(some, device, False, allow=["torch.cond"])
    key, text = trial.failure
    assert label(key) == "torch.cond" and "cond at " in text and not trial.clean


def test_what_thunder_does_not_compile(device):
    some = made(lambda x: x.unique(), (4,), device=device)
    with pytest.raises(NotTraced, match="NotImplementedError"):
        attempt(some, device, False)
    assert capture_alone(some[0], device, False)[0] == "fail"


def test_a_derivative_is_captured_alone(device):
    passes = made(torch.tanh, (4,), device=device, grad=True)[0]
    fails = made(lambda x: torch.linalg.svd(x)[1], (4, 4), device=device, grad=True)[0]
    assert capture_alone(passes, device, True) == ("pass", "")
    assert capture_alone(fails, device, True)[0] == "fail"


def pairs(*found: float) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    return [([torch.ones(2)], [torch.full((2,), value)]) for value in found]


def test_verdicts():
    steady, varying = (lambda draw: [torch.ones(2)]), iter(range(1, 99))
    assert verdict(pairs(1.0, 1.0), steady) == "pass"
    assert verdict(pairs(1.0, 1.0000001), steady) == "wrong"
    assert verdict(pairs(1.0, 1.0000001), lambda draw: [torch.ones(2) + 1e-6 * next(varying)]) == "nondeterministic"
    assert verdict(pairs(1.0, 2.0), lambda draw: [torch.ones(2) + 1e-6 * next(varying)]) == "wrong"
    assert verdict([([torch.zeros(2)], [-torch.zeros(2)])], lambda draw: [torch.zeros(2)]) == "wrong"
    assert verdict([([torch.zeros(2, 3)], [torch.zeros(3, 2).T])], lambda draw: [torch.zeros(2, 3)]) == "wrong"
    assert verdict(pairs(2.0), steady, defined=False) == "pass"


def warned(draw: int) -> list[torch.Tensor]:
    index = torch.tensor([0, 1])
    return [torch.ones(2).put_(index, torch.ones(2))]  # deterministic or not depends on the index, says PyTorch


def told(draw: int) -> list[torch.Tensor]:
    return [torch.ones(2) + 1e-6 * torch.are_deterministic_algorithms_enabled()]


@pytest.mark.parametrize("again", [warned, told])
def test_what_pytorch_says_to_vary_may_vary_a_little(again):
    assert verdict(pairs(1.0, 1.0000001), again) == "nondeterministic"
    assert verdict(pairs(1.0, 2.0), again) == "wrong"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_crash_by_force_is_what_came_of_it():
    record = OperatorRecord(OperatorTask(0, "linalg_inv", 24))
    record.end("status -11, not while forcing")
    assert record.crash and not record.symbols and not record.is_forced
    record.forcing = "torch.inv"
    record.end("status -11")
    assert record.symbols == {"torch.inv": {"forced fail": 1}} and record.is_forced
    assert record.notes == {"torch.inv fail": "linalg_inv [0:24]: status -11"}
    harmless = OperatorRecord(OperatorTask(0, "add", 24), symbols={"torch.add": {"forward pass": 2, "alone pass": 1}})
    assert not harmless.is_forced


@pytest.mark.parametrize(("off", "expected"), [(1e-3, "nondeterministic"), (3e-3, "nondeterministic"), (9e-3, "wrong")])
def test_a_sum_that_varies_is_judged_by_how_much(off, expected):
    """Calls without a graph are 1e-3 apart, which is more than a tolerance has for a value of 1."""
    drift = cycle([0.0, 1e-3])
    usual, mine = torch.ones(3), torch.ones(3) + off
    assert verdict([([usual], [mine])], lambda draw: [usual + next(drift)]) == expected
    assert verdict([([usual], [mine])], lambda draw: [usual.clone()]) == "wrong"  # it does not vary at all
    assert verdict([([usual], [mine.double()])], lambda draw: [usual + next(drift)]) == "wrong"
    assert verdict([([usual], [mine * torch.nan])], lambda draw: [usual + next(drift)]) == "wrong"


def test_a_graph_that_is_refused_for_no_operator_in_particular():
    case = OperatorCase("dot", lambda device, grad: (), symbol="torch.dot")
    record = OperatorRecord(OperatorTask(0, "dot", 24))
    measured = _CaseMeasurement(case, "cpu", False, record)
    measured.take(CaptureTrial(failure=(None, "CaptureRefused: it copies 4 bytes from the host's memory")), [(3, None)])
    assert record.symbols == {"torch.dot": {"forward barred": 1}} and "dot[3]" in record.notes["torch.dot barred"]
    measured.take(
        CaptureTrial(failure=(("torch", "dot"), "torch.dot at a.py:1: CaptureRefused: it waits")), [(4, None)]
    )
    assert record.symbols["torch.dot"] == {"forward barred": 1, "forward fail": 1}


@pytest.mark.parametrize("conj", [False, True])
def test_bits_are_compared_whatever_the_strides(conj):
    whole = torch.randn(4, 6, dtype=torch.complex64)
    for part in (whole[:1, :1], whole[:, ::2], whole.T, whole[0, 0], whole[:0], whole.expand(2, 4, 6), whole.real):
        part = part.conj() if conj else part
        (same,), (other,) = twins([part]), twins([part])
        assert verdict([([part], [same])], lambda draw, same=same: [same]) == "pass"
        if part.numel():
            other[(-1,) * other.dim()] += 1
            assert verdict([([part], [other])], lambda draw, same=same: [same]) == "wrong"


def test_draws_are_fresh_and_laid_out_alike():
    def draw(device: str, grad: bool):
        yield Sample(torch.add, (torch.randn(4, 3).T, torch.arange(3.0).expand(3, 3)[:, :1]))

    (call,) = calls(OperatorCase("made", draw), "cpu", False)
    assert len(call.draws) == DRAWS and not call.is_stale
    assert {tuple(t.stride() for t in tensors) for tensors in call.draws} == {((1, 3), (0, 1))}
    assert len({tuple(tensors[0].flatten().tolist()) for tensors in call.draws}) == DRAWS


def test_twins_share_what_the_originals_share():
    x = torch.randn(4, 4)
    a, b, c = twins([x, x[1:], torch.randn(2)])
    assert torch.equal(a, x) and b.data_ptr() == a.data_ptr() + 16 and a.data_ptr() != x.data_ptr()
    assert c.data_ptr() not in (a.data_ptr(), b.data_ptr())


LIVE = ("add", "sum", "softmax", "linalg_cond", "transpose", "nn_functional_dropout")


@pytest.mark.parametrize("name", [*LIVE[:2], *(pytest.param(name, marks=pytest.mark.nightly) for name in LIVE[2:])])
def test_a_slice_of_the_operator_sweep(name, device):
    """What the released results were made by, on a few samples."""
    *_, record = measure(OperatorTask(0, name, 3), device)
    assert record.tried == record.traced == 3 and not record.untraced
    ends = {end for counts in record.symbols.values() for end in counts}
    denied = name == "linalg_cond"
    assert ends <= {"forward pass", "backward pass", "forced fail", "alone fail"}
    assert ("forced fail" in ends) == denied and (denied or "forward pass" in ends)


def test_names_of_cases_are_stable():
    found = cases("cpu")
    assert {"add", "add in place", "abs as torch.absolute", "by hand: lstm_cell"} <= found.keys()
    assert len(found) > 1200


def test_the_table_leaves_the_process_as_it_was():
    cases("cpu")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
