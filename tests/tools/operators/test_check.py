"""check: rules and measurements agree, and where they would not, it is seen."""

from __future__ import annotations

import pytest
from packaging.version import Version
from thunder.executors import torchex
from unreached import UNREACHED, WHY

from thunder_cg.analysis.rules import RULES, Evidence
from thunder_cg.report.rules import RESULTS
from thunder_cg.tools.operators.check import ONLY_ON_A_GPU, disagreements
from thunder_cg.tools.operators.results import OperatorResults

OP_DB = 697


@pytest.fixture(scope="module", params=sorted(RESULTS.glob("rules-*.json")), ids=lambda path: path.stem)
def measured(request) -> OperatorResults:
    return OperatorResults.read(request.param)


def test_rules_say_what_was_measured():
    files = [OperatorResults.read(path) for path in RESULTS.glob("rules-*.json")]
    assert files and disagreements(files) == []


def test_an_operator_that_a_cpu_refuses():
    (executor, name), *_ = sorted(key for key in ONLY_ON_A_GPU if key[0] == "torch")
    assert executor == "torch" and about(name, on("tape")) == []
    assert about(name, on("tape", **{name: {"alone fail": 1}})) == []
    assert about(name, on("tape"), on("cuda", **{name: {"alone pass": 1, "forced fail": 1}})) == []
    assert "it was not" in about(name, on("tape"), on("cuda"))[0]


def test_a_measurement_says_on_what(measured):
    assert {"device", "backend", "torch", "thunder", "python", "date", "cuda"} <= measured.environment.keys()
    assert Version(measured.environment["torch"]) >= Version("2.9") and measured.environment["device"]


def test_the_table_of_pytorch_is_driven_through(measured):
    """No fewer than Thunder was seen to compile, with every sample."""
    entries = {n: c for n, c in measured.cases.items() if not any(w in n for w in (" as ", " in place", "by hand: "))}
    assert OP_DB - 3 <= len(entries) <= OP_DB  # three have samples on a GPU only
    assert sum(case.get("traced", 0) > 0 for case in entries.values()) >= 543
    assert [n for n, c in entries.items() if c.get("tried", 0) != c["samples"] and not c.get("crashes")] == []
    through_thunder = {
        symbol
        for symbol, ends in measured.symbols.items()
        if symbol.startswith("torch.") and any(end.split()[0] in ("forward", "backward", "forced") for end in ends)
    }
    assert len(through_thunder) >= 463


def test_what_thunder_does_not_compile_says_why(measured):
    silent = [
        name
        for name, case in measured.cases.items()
        if case["samples"] and not case.get("traced") and not case.get("untraced") and not case.get("crashes")
    ]
    assert silent == []


def test_every_symbol_was_measured_or_says_why_not():
    """Read in the records alone; `test_rules_say_what_was_measured` compares them with the results."""
    for name in torchex.ex.opmap:
        rule = RULES["torch", name]
        assert rule.evidence is not Evidence.KNOWN and (rule.key in UNREACHED) == (
            rule.evidence is Evidence.NOT_MEASURED
        ), name
    assert [key for key, why in UNREACHED.items() if why is None] == []


def test_no_reason_is_given_for_what_was_measured():
    names = {name for names in WHY.values() for name in names.split()}
    assert [name for name in names if ("torch", name) not in UNREACHED] == []
    assert [key for key in ONLY_ON_A_GPU if key not in RULES or key in UNREACHED] == []


# ------------------------------------------------------------------------------------------------ planted disagreements


def on(backend: str, **symbols: dict[str, int]) -> OperatorResults:
    made = OperatorResults({"backend": backend, "device": "a machine"})
    made.symbols = {f"torch.{name}": counts for name, counts in symbols.items()}
    return made


def about(name: str, *files: OperatorResults) -> list[str]:
    return [text for text in disagreements(files) if text.startswith(f"torch.{name}:")]


FINE = {"forward pass": 2}


@pytest.mark.parametrize("backend", ["tape", "cuda"])
@pytest.mark.parametrize("end", ["forward wrong", "backward fail"])
def test_an_allowed_symbol_that_fails(backend, end):
    (text,) = about("add", on(backend, add={**FINE, end: 1}))
    assert end in text and "a machine" in text
    assert about("add", on(backend, add={**FINE, "forward nondeterministic": 1, "forced fail": 1})) == []
    # A form that Thunder does not compile may fail, if another is right.
    assert about("add", on(backend, add={**FINE, "alone fail": 1})) == []
    assert "alone fail" in about("add", on(backend, add={"alone fail": 1}))[0]
    # Of some calls the run time may refuse the graph, but not of all.
    assert about("add", on(backend, add={**FINE, "forward barred": 1})) == []
    assert "forward barred" in about("add", on(backend, add={"forward barred": 1}))[0]


def test_a_denied_symbol_that_passes_everything():
    assert "allow it" in about("lobpcg", on("tape", lobpcg={"forced pass": 4}))[0]
    harmless = on("tape", eigvals={"forced pass": 4})
    assert about("eigvals", harmless) == []  # a CPU waits for nothing
    (text,) = about("eigvals", harmless, on("cuda", eigvals={"forced pass": 4, "alone pass": 1}))
    assert "allow it" in text
    for end in ("forced fail", "forced wrong", "forced barred", "alone fail"):
        assert about("eigvals", harmless, on("cuda", eigvals={"forced pass": 4, end: 1})) == []


def test_what_only_a_gpu_can_tell_says_so():
    assert RULES["torch", "eigvals"].evidence is Evidence.MEASURED_ON_GPU
    assert "only a GPU" in Evidence.MEASURED_ON_GPU.value
    assert "a CPU does" in about("eigvals", on("tape", eigvals={"forced pass": 4, "forced wrong": 1}))[0]
    assert not any(rule.captures for rule in RULES.values() if rule.evidence is Evidence.MEASURED_ON_GPU)


def test_a_derivative_that_thunder_has_no_symbol_for():
    assert RULES["torch", "abs_vjp"].captures and "abs_vjp" not in torchex.ex.opmap
    assert about("abs_vjp", on("tape")) == []


def test_a_symbol_without_a_row():
    assert "no rule knows it" in about("new_operator", on("tape", new_operator=FINE))[0]


def test_a_claim_without_a_measurement():
    assert "it was not" in about("add", on("tape"))[0]
    assert about("add", on("tape", add=FINE)) == []


def test_a_symbol_that_is_reached_after_all():
    (executor, name), *_ = UNREACHED
    assert executor == "torch"
    assert "something does" in about(name, on("tape", **{name: {"alone pass": 1, "forced fail": 1}}))[0]
