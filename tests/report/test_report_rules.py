"""report.rules: the record of one operator as text."""

from __future__ import annotations

import json

import pytest

from thunder_cg.analysis.rules import RULES, Evidence
from thunder_cg.report import rules as report
from thunder_cg.report.rules import describe


@pytest.mark.parametrize("name", ["det", "torch.det", "torch.linalg.det", "Tensor.det"])
def test_all_names_of_an_operator_lead_to_one_record(name):
    assert describe(name) == describe("det")
    first, *lines = describe(name).splitlines()
    assert first == "torch.det" and "captured: it only launches kernels" in lines[0]
    assert any(line.startswith("torch.det_vjp, its derivative") for line in lines)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("UNIFORM", "prim.UNIFORM"),
        ("prims.UNIFORM", "prim.UNIFORM"),
        ("torch.ops.aten.embedding_backward", "torch.ops.aten.embedding_backward"),
        ("nvfuser.nv_sdpfa_fwd", "nvfuser.nv_sdpfa_fwd"),
        ("nv_sdpfa_fwd", "nvfuser.nv_sdpfa_fwd"),
        ("python.add", "python.add"),
        ("min_vjp", "torch.min_vjp"),
    ],
)
def test_prims_derivatives_and_other_executors_have_names(name, label):
    assert describe(name).splitlines()[0] == label


def test_a_condition_says_when_it_holds_and_what_follows():
    text = describe("masked_fill")
    assert "has_tensor_fill_value: The value to fill in is a tensor." in text
    assert "then eager, depends on what tensors hold" in text and "fix: use torch.where" in text
    assert "may write an input: the first tensor" in describe("relu") and "then it draws" in describe(
        "scaled_dot_product_attention"
    )


def test_an_eager_operator_says_why_and_how_to_change_it():
    text = describe("eigvals")
    assert "eager, waits for the device" in text and "move the decomposition out" in text
    assert "only a GPU shows" in text and "cuSOLVER" in text
    assert "not measured" in describe("pin_memory") and "among all collectives" in describe("ALL_REDUCE")


def test_memory_kernels_and_draws():
    assert "a result may share memory with an input: the first tensor" in describe("view")
    assert "launches none" in describe("view") and "draws" in describe("rand")
    assert "it may write an input: the last tensor" in describe("copy_")


def test_results_of_the_sweep(tmp_path, monkeypatch):
    environment = {"device": "a machine", "backend": "cuda", "torch": "2.11"}
    results = {
        "environment": environment,
        "symbols": {"torch.item": {"forced fail": 4}, "torch.det": {"forward pass": 2}},
        "notes": {"torch.item fail": "item[0]: it waits"},
    }
    (tmp_path / "rules-a.json").write_text(json.dumps(results), encoding="utf-8")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert "a machine, cuda, torch 2.11: forced fail 4" in describe("item") and "item[0]: it waits" in describe("item")
    assert "forward pass 2" in describe("det")
    assert "no such symbol" in describe("__getitem___vjp")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "nowhere")  # as in a wheel
    assert "forward pass" not in describe("det") and Evidence.MEASURED.value in describe("det")


@pytest.mark.parametrize(("name", "close"), [("torch.dett", "torch.det"), ("UNIFROM", "prim.UNIFORM")])
def test_an_unknown_name_has_close_ones(name, close):
    with pytest.raises(LookupError, match="no rule knows") as error:
        describe(name)
    assert close in str(error.value)


@pytest.mark.parametrize("name", ["", "my_ex.add", "torch.", "."])
def test_a_name_that_no_rule_has(name):
    with pytest.raises(LookupError):
        describe(name)


def test_every_record_can_be_described(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    for executor, name in RULES:
        described = describe(report._label((executor, name)))
        assert name in described.splitlines()[0]
