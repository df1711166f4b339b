"""Compares the rules with the results of the operator sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from thunder_cg.analysis.rules import RULES, Evidence, Key
from thunder_cg.compat.thunder import torch_executor_has
from thunder_cg.tools.operators.measure import key_of, label
from thunder_cg.tools.operators.results import OperatorResults

_REFUSED_ON_CPU = """
    batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_stats get_and_update_rng_state_impl nanquantile nanquantile_vjp
    one_hot quantile quantile_vjp
"""

ONLY_ON_A_GPU: frozenset[Key] = frozenset(
    {*(("torch", name) for name in _REFUSED_ON_CPU.split()), *(key for key in RULES if key[0] == "sdpa")}
)
"""Operators that no call comes to on a CPU, that a CPU refuses, or that read what their arguments hold there."""

SHOWN = frozenset({"fail", "wrong", "barred"})
FINE = frozenset({"pass", "nondeterministic"})


def disagreements(files: Sequence[OperatorResults]) -> list[str]:
    """The differences between rules and measurements, a sentence each.

    Some file must show that a denied symbol cannot be captured. A kernel that waits for the host is harmless where host
    and device are one: `Evidence.MEASURED_ON_GPU` needs that only if a file is from a GPU.
    """
    found = [text for file in files for text in _wrong_rows(file)]
    on_gpu = any(file.environment["backend"] == "cuda" for file in files)
    for symbol in sorted({symbol for file in files for symbol in file.symbols}):
        rule = RULES.get(key_of(symbol))
        if rule is None or rule.captures:
            continue
        is_shown = not _ends(files, symbol).isdisjoint(SHOWN)
        needs_gpu = rule.evidence is Evidence.MEASURED_ON_GPU
        if not is_shown and (on_gpu or not needs_gpu):
            found.append(f"{symbol}: denied, but captured by force it does what it does uncaptured; allow it")
        if is_shown and needs_gpu and not on_gpu:
            found.append(f"{symbol}: its record says that only a GPU can tell, and a CPU does; make it MEASURED")
    for key in RULES:
        found += _claims(files, key, on_gpu)
    return found


def _wrong_rows(file: OperatorResults) -> Iterable[str]:
    where = f"{file.environment['backend']}, {file.environment['device']}"
    for symbol, counts in file.symbols.items():
        key = key_of(symbol)
        rule = RULES.get(key)
        if key in ONLY_ON_A_GPU and file.environment["backend"] != "cuda":
            continue
        if rule is not None and rule.captures:
            for end in _failures(counts):
                note = file.notes.get(f"{symbol} {end.split()[1]}", "")
                yield f"{symbol}: allowed, and {end} on {where} ({note}); deny it, or fix what is wrong"
        elif rule is None and key[1] != "fusion":
            yield f"{symbol}: no rule knows it; it was met on {where}; give it a record"


def _failures(counts: Mapping[str, int]) -> list[str]:
    """The failures of an allowed symbol: in a region or, if no capture of it ever passed, without Thunder.

    Two failures are fine if other calls pass. Forms of an operator that Thunder does not compile cannot get into a
    region. And the run time may refuse the graph of a call: for a product of empty vectors, cuBLAS copies a zero from
    the host.
    """
    right = any(end.split()[1] in FINE for end in counts)
    how, fine = (("forward", "backward"), FINE | {"barred"}) if right else (("forward", "backward", "alone"), FINE)
    return [end for end in counts if end.split()[0] in how and end.split()[1] not in fine]


def _ends(files: Iterable[OperatorResults], symbol: str) -> set[str]:
    """The outcomes of a symbol in all files, however it was captured."""
    return {end.split()[1] for file in files for end in file.symbols.get(symbol, {})}


def _claims(files: Sequence[OperatorResults], key: Key, on_gpu: bool) -> Iterable[str]:
    """Compares what the record of a symbol says about its measurement with the files."""
    executor, id_ = key
    if executor == "torch" and not torch_executor_has(str(id_)):
        return
    symbol = label(key)
    measured = bool(_ends(files, symbol))
    evidence = RULES[key].evidence
    claimed = evidence in (Evidence.MEASURED, Evidence.MEASURED_ON_GPU)
    if claimed and not measured and (on_gpu or key not in ONLY_ON_A_GPU):
        yield f"{symbol}: its record says that it was measured, and it was not; make it NOT_MEASURED"
    if evidence is Evidence.NOT_MEASURED and measured:
        yield f"{symbol}: its record says that nothing reaches it, and something does; make it MEASURED"
