"""Do the rules say what was measured?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from thunder_cg.analysis.rules import RULES, Evidence, Key
from thunder_cg.tools.operators.coverage import ONLY_ON_A_GPU
from thunder_cg.tools.operators.measure import Counts, key_of
from thunder_cg.tools.operators.results import Results
from thunder_cg.tools.operators.samples import exists

FOLDER = Path(__file__).parents[1] / "results"
SHOWN = frozenset({"fail", "wrong", "barred"})
FINE = frozenset({"pass", "nondeterministic"})


def packaged() -> list[Results]:
    """What was measured for this release, one machine a file."""
    return [Results.read(path) for path in sorted(FOLDER.glob("rules-*.json"))]


def disagreements(files: Sequence[Results]) -> list[str]:
    """Where rules and measurements differ, a sentence each.

    Some machine in `files` shows that a denied symbol must not be captured. A kernel that asks the host harms nothing
    where host and device are one. So a GPU shows this for `Evidence.MEASURED_ON_GPU`, once there is one in `files`.
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


def _wrong_rows(file: Results) -> Iterable[str]:
    where = f"{file.environment['backend']}, {file.environment['device']}"
    for symbol, counts in file.symbols.items():
        key = key_of(symbol)
        rule = RULES.get(key)
        if key in ONLY_ON_A_GPU and file.environment["backend"] != "cuda":
            continue
        if rule is not None and rule.captures:
            for end in _failures(counts):
                note = file.notes.get(f"{symbol} {end.split()[1]}", "")
                yield f"{symbol}: allowed, and {end} on {where} ({note}); deny it, or mend what is wrong"
        elif rule is None and key[1] != "fusion":
            yield f"{symbol}: no rule knows it; it was met on {where}; give it a record"


def _failures(counts: Counts) -> list[str]:
    """What went wrong with an allowed symbol: in a region, or, if nothing of it ever went right, without Thunder.

    Forms of an operator that Thunder does not compile cannot get into a region, so that they may fail. And of some
    calls the run time may refuse the graph: of a product of vectors without elements, cuBLAS copies the zero from the
    host.
    """
    right = any(end.split()[1] in FINE for end in counts)
    how, fine = (("forward", "backward"), FINE | {"barred"}) if right else (("forward", "backward", "alone"), FINE)
    return [end for end in counts if end.split()[0] in how and end.split()[1] not in fine]


def _ends(files: Iterable[Results], symbol: str) -> set[str]:
    """To which ends it came, however it was captured."""
    return {end.split()[1] for file in files for end in file.symbols.get(symbol, {})}


def _claims(files: Sequence[Results], key: Key, on_gpu: bool) -> Iterable[str]:
    """A record says truly whether it was measured."""
    executor, id_ = key
    if executor == "torch" and not exists(str(id_)):
        return
    symbol = f"{executor or 'prim'}.{id_}"
    measured = bool(_ends(files, symbol))
    evidence = RULES[key].evidence
    claimed = evidence in (Evidence.MEASURED, Evidence.MEASURED_ON_GPU)
    if claimed and not measured and (on_gpu or key not in ONLY_ON_A_GPU):
        yield f"{symbol}: its record says that it was measured, and it was not; make it NOT_MEASURED"
    if evidence is Evidence.NOT_MEASURED and measured:
        yield f"{symbol}: its record says that nothing reaches it, and something does; make it MEASURED"
