"""The record of one operator as text, for ``python -m thunder_cg rules torch.det``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thunder_cg.analysis.advice import fitting
from thunder_cg.analysis.rules import RULES, VJP, AliasedInputs, Condition, Evidence, Key, Rule, find
from thunder_cg.compat.settings import Settings

_GROUPS = tuple(group for group in Settings if group not in (Settings.NONE, Settings.ALL))
RESULTS = Path(__file__).parents[1] / "tools" / "results"  # in the repository only; a wheel has none
_TESTS = "tests/analysis/test_rules.py, tests/analysis/test_classify.py, tests/tools/operators/test_check.py"


def describe(name: str) -> str:
    """The record of an operator, and of its derivative if Thunder may have one.

    Args:
        name: a printed name (``"torch.linalg.det"``, ``"Tensor.item"``), an id (``"det"``, ``"det_vjp"``), an executor
            and an id (``"sdpa.sdpaex_scaled_dot_product_efficient_attention_backward"``), or a prim (``"UNIFORM"``).

    Raises:
        LookupError: no record has this name. The message has the names that come close.
    """
    if (rule := _find(name)) is None:
        raise LookupError(_unknown(name))
    lines = [_label(rule.key), *_record(rule)]
    if (derivative := RULES.get((rule.key[0], f"{rule.key[1]}{VJP}"))) is not None:
        title = f"{_label(derivative.key)}, its derivative, where Thunder runs it through torch.autograd"
        lines += ["", title, *_record(derivative)]
    return "\n".join([*lines, "", _entry("tests", _TESTS)])


def _find(name: str) -> Rule | None:
    if name.startswith(("torch.", "Tensor.")):
        return find(None, name) or find("torch", name.removeprefix("torch."))
    executor, _, id_ = name.partition(".")
    if id_:
        return find(None if executor in ("prim", "prims") else executor, id_)
    return find("torch", name) or find(None, name) or next((r for key, r in RULES.items() if key[1] == name), None)


def _unknown(name: str) -> str:
    last = name.rsplit(".", 1)[-1]
    labels = {str(key[1]): _label(key) for key in [*RULES][::-1]}
    close = [labels[id_] for id_ in difflib.get_close_matches(last, labels, n=5)]
    hint = f"; close to it: {', '.join(close)}" if close else ""
    return f"no rule knows {name!r}{hint}. An operator without a rule stays eager unless allow= names it."


def _label(key: Key) -> str:
    executor, id_ = key
    return str(id_) if str(id_).startswith("torch.") else f"{executor or 'prim'}.{id_}"


def _record(rule: Rule) -> Iterator[str]:
    verdict = "captured" if rule.captures else f"eager, {rule.cause.reason.value}"
    yield _entry("verdict", f"{verdict}: {rule.cause.detail}")
    if rule.cause.fix:
        yield _entry("fix", fitting(rule.cause.fix, str(rule.key[1]), None))
    for condition in rule.conditions:
        yield from _condition(condition)
    yield _entry("memory", _memory(rule.aliases, rule.writes) or "its results are new; it writes no input")
    yield _entry("kernels", "launches kernels" if rule.launches_kernels else "launches none, or hardly ever")
    if rule.captures:
        yield _entry("settings", _settings(rule.settings))
    if rule.draws:
        yield _entry("draws", "it draws from a generator, in the order of the trace")
    if rule.is_collective:
        yield _entry("collective", "it keeps its order among all collectives")
    evidence, measured = _evidence(rule.evidence, rule.cause.source), [*_measured(rule.key)]
    if rule.evidence is Evidence.MEASURED and not measured and any(_files()):
        evidence = "none: the versions of Thunder that were measured have no such symbol"
    yield _entry("evidence", evidence)
    yield from (_entry("", text) for text in measured)


def _condition(condition: Condition) -> Iterator[str]:
    yield _entry("condition", f"{condition.name}: {condition.when}")
    if condition.cause is not None:
        yield _entry("", f"then eager, {condition.cause.reason.value}: {condition.cause.detail}")
        yield _entry("", f"fix: {condition.cause.fix}")
        yield _entry("", f"evidence: {_evidence(condition.evidence, condition.cause.source)}")
    if memory := _memory(condition.aliases, condition.writes):
        yield _entry("", f"then {memory}")
    if condition.draws:
        yield _entry("", "then it draws from a generator")


def _settings(groups: Settings) -> str:
    named = [str(group.name).lower() for group in _GROUPS if group in groups]
    return f"PyTorch's settings for {', '.join(named)} may choose its kernels" if named else "none chooses its kernels"


def _memory(aliases: AliasedInputs | None, writes: AliasedInputs | None) -> str:
    said = [f"a result may share memory with an input: {aliases.value}"] if aliases else []
    said += [f"it may write an input: {writes.value}"] if writes else []
    return "; ".join(said)


def _evidence(evidence: Evidence, source: str) -> str:
    return f"{evidence.value}; {source}" if source else evidence.value


def _measured(key: Key) -> Iterator[str]:
    """What the operator sweep measured, a line for each machine, and the first failures."""
    symbol = f"{key[0] or 'prim'}.{key[1]}"
    for path in _files():
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        counts = results["symbols"].get(symbol)
        if counts:
            machine = results["environment"]
            ends = ", ".join(f"{end} {count}" for end, count in sorted(counts.items()))
            yield f"{machine['device']}, {machine['backend']}, torch {machine['torch']}: {ends}"
        for end in sorted({end.split()[1] for end in counts or ()}):
            if note := results["notes"].get(f"{symbol} {end}"):
                yield f"  {end}: {note}"


def _files() -> list[Path]:
    return sorted(RESULTS.glob("rules-*.json"))


def _entry(title: str, text: str) -> str:
    return f"  {title:<12}{text}"
