"""Do the rules say what was measured?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from thunder_cg.analysis import rules
from thunder_cg.analysis.rules import Key
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

    That a denied symbol must not be captured is shown on some machine in `files`. A kernel that asks the host harms
    nothing where host and device are one: of `rules.UP_TO_A_GPU` it is shown on a GPU, once there is one among them.
    """
    found = [text for file in files for text in _wrong_rows(file)]
    on_gpu = any(file.environment["backend"] == "cuda" for file in files)
    symbols = {symbol for file in files for symbol in file.symbols if key_of(symbol) in rules.DENY}
    for symbol in sorted(symbols):
        is_shown = not _ends(files, symbol).isdisjoint(SHOWN)
        if not is_shown and (on_gpu or key_of(symbol) not in rules.UP_TO_A_GPU):
            found.append(f"{symbol}: denied, but captured by force it does what it does uncaptured; allow it")
        if is_shown and key_of(symbol) in rules.UP_TO_A_GPU and not on_gpu:
            found.append(f"{symbol}: its row says that only a GPU can tell, and a CPU does; take it out of UP_TO_A_GPU")
    for key in (*rules.ALLOW, *rules.DENY):
        found += _claims(files, key, on_gpu)
    return found


def _wrong_rows(file: Results) -> Iterable[str]:
    where = f"{file.environment['backend']}, {file.environment['device']}"
    for symbol, counts in file.symbols.items():
        key = key_of(symbol)
        if key in rules.ONLY_ON_A_GPU and file.environment["backend"] != "cuda":
            continue
        if key in rules.ALLOW:
            for end in _failures(counts):
                note = file.notes.get(f"{symbol} {end.split()[1]}", "")
                yield f"{symbol}: allowed, and {end} on {where} ({note}); deny it, or mend what is wrong"
        elif key not in rules.DENY and key[1] != "fusion":
            yield f"{symbol}: no rule knows it; it was met on {where}; give it a row"


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
    """A row says that it was measured, or why not."""
    executor, id_ = key
    if executor == "torch" and not exists(str(id_)):
        return
    symbol = f"{executor or 'prim'}.{id_}"
    measured = bool(_ends(files, symbol))
    source = (rules.ALLOW.get(key) or rules.DENY[key]).source
    if source.startswith(rules.MEASURED) and not measured and (on_gpu or key not in rules.ONLY_ON_A_GPU):
        yield f"{symbol}: its row says that it was measured, and it was not; say in rules.UNREACHED why not"
    if source.startswith(rules.NOT_REACHED) and measured:
        yield f"{symbol}: its row says that nothing reaches it, and something does; take it out of rules.UNREACHED"
