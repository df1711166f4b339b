"""What is measured of some samples of a case: as the rules have it, and with each denied symbol captured by force."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch

from thunder_cg.analysis import rules
from thunder_cg.analysis.rules import Key
from thunder_cg.sweep.samples import Call, Case, calls, cases
from thunder_cg.sweep.trial import NotTraced, Trial, attempt

SHOWN = 3  # samples that fail when a symbol is captured by force, after which no more are tried
SINGLY = 8  # samples that are tried one by one before the rest is tried together

Counts = dict[str, int]


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """Some samples of a case: those from `start` to `stop`."""

    start: int
    case: str
    grad: bool
    stop: int

    @property
    def name(self) -> str:
        return f"{self.case}{' with gradients' if self.grad else ''} [{self.start}:{self.stop}]"


@dataclass(slots=True)
class Record:
    """What came of a task.

    Attributes:
        total: how many samples the case has; of them were `tried` here, and Thunder compiled and ran `traced`.
        stale: samples for which no fresh values are to be had.
        untraced: why Thunder does not, and of how many samples.
        symbols: by symbol, and "forward" or "backward" in which it was captured: how often with which outcome: "pass",
            "wrong", "nondeterministic" or "fail".
        forced: the same of denied symbols that were captured by force; "barred" is what even `allow=` does not capture.
        notes: of what did not pass, the first of each kind.
    """

    task: Task
    total: int = 0
    tried: int = 0
    traced: int = 0
    stale: int = 0
    untraced: Counts = field(default_factory=dict)
    symbols: dict[str, Counts] = field(default_factory=dict)
    forced: dict[str, Counts] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    crash: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Record:
        return cls(**{**content, "task": Task(**content["task"])})

    def count(self, table: dict[str, Counts], symbol: str, outcome: str, many: int = 1) -> None:
        counts = table.setdefault(symbol, {})
        counts[outcome] = counts.get(outcome, 0) + many

    def note(self, symbol: str, outcome: str, text: str) -> None:
        self.notes.setdefault(f"{symbol} {outcome}", text)


def label(key: Key) -> str:
    """A symbol as one word: "torch.add", "prim.ADD"."""
    executor, id_ = key
    return f"{executor or 'prim'}.{id_}"


def key_of(symbol: str) -> Key:
    """The symbol that `label` wrote."""
    executor, _, id_ = symbol.partition(".")
    return None if executor == "prim" else executor, id_


def measure(task: Task, device: str) -> Iterator[Record]:
    """Measures a task; yields its record twice: as soon as there are results worth keeping, and at the end."""
    case = _cases(device)[task.case]
    every = _calls(task.case, device, task.grad)
    record = Record(task, total=len(every))
    run = _Measure(case, device, task.grad, record, task.start)
    mine = every[task.start : task.stop]
    record.tried = len(mine)
    record.stale = sum(call.is_stale for call in mine)
    done = run.as_decided(list(enumerate(mine)))
    yield record
    run.by_force(done)
    if device == "cuda":
        torch.cuda.synchronize()
    yield record


@lru_cache(maxsize=2)
def _calls(name: str, device: str, grad: bool) -> list[Call]:
    return calls(_cases(device)[name], device, grad)


@lru_cache(maxsize=1)
def _cases(device: str) -> dict[str, Case]:
    return cases(device)


Numbered = list[tuple[int, Call]]


@dataclass(slots=True)
class _Measure:
    case: Case
    device: str
    grad: bool
    record: Record
    start: int

    def attempt(self, numbered: Sequence[tuple[int, Call]], allow: Sequence[str] = ()) -> Trial:
        some = [call for _, call in numbered]
        alone = some * 2 if len(some) == 1 else some  # two kernels make a region
        return attempt(alone, self.device, self.grad, allow, self.case.executors)

    def as_decided(self, numbered: Numbered) -> dict[Key, Numbered]:
        """Under the rules as they are. Returns the symbols that stayed eager, and in which samples."""
        eager: defaultdict[Key, Numbered] = defaultdict(list)
        waiting = [numbered] if numbered else []
        while waiting:
            batch = waiting.pop()
            try:
                trial = self.attempt(batch)
            except NotTraced as error:
                if len(batch) > 1:
                    waiting += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
                    continue
                trial = self.last_try(batch, error)
                if trial is None:
                    continue
            if not trial.clean and len(batch) > 1:
                waiting += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
                continue
            self.take(trial, batch)
            for key in trial.eager:
                eager[key] += batch
        return eager

    def last_try(self, batch: Numbered, error: NotTraced) -> Trial | None:
        """Values that were shuffled need not be what the operator takes."""
        ((number, call),) = batch
        if error.draw == 0:
            self.count_untraced(str(error))
            return None
        batch[0] = (number, call.with_one_draw())
        try:
            trial = self.attempt(batch)
        except NotTraced as again:
            self.count_untraced(str(again))
            return None
        self.record.stale += 1
        return trial

    def count_untraced(self, reason: str) -> None:
        self.record.untraced[reason] = self.record.untraced.get(reason, 0) + 1

    def take(self, trial: Trial, batch: Numbered) -> None:
        record = self.record
        record.traced += len(batch)
        if trial.failure is not None:
            blamed, text = trial.failure
            for key in [blamed] if blamed is not None else trial.eager or [("sweep", "unknown")]:
                record.count(record.symbols, label(key), "forward fail")
                record.note(label(key), "fail", self.where(batch, text))
        outcome = _worst(trial.verdicts)
        for kind, counts in trial.captured.items():
            for key, many in counts.items():
                record.count(record.symbols, label(key), f"{kind} {outcome}", many)
                if outcome != "pass":
                    record.note(label(key), outcome, self.where(batch, ""))

    def where(self, batch: Numbered, text: str) -> str:
        number = self.start + batch[0][0]
        gradients = " with gradients" if self.grad else ""
        return f"{self.case.name}[{number}]{gradients}" + (f": {text}" if text else "")

    def by_force(self, eager: Mapping[Key, Numbered]) -> None:
        for key, numbered in eager.items():
            if self.grad and not label(key).endswith("_vjp"):
                continue  # tried without gradients
            singly, rest = numbered[:SINGLY], numbered[SINGLY:]
            shown = 0
            for one in singly:
                shown += self.force(key, [one])
                if shown == SHOWN:
                    break
            else:
                if rest and not shown:
                    self.force(key, rest)

    def force(self, key: Key, batch: Numbered) -> bool:
        """Captures a denied symbol. Returns whether it failed, was wrong, or could not even be tried."""
        record, name = self.record, label(key)
        try:
            trial = self.attempt(batch, allow=[name.removeprefix("prim.")])
        except NotTraced:
            return False
        outcome, text = "pass", ""
        if trial.failure is not None:
            outcome, text = "fail", trial.failure[1]
        elif "wrong" in trial.verdicts:
            outcome = "wrong"
        elif key in trial.eager:
            outcome, text = "barred", trial.eager[key]
        elif "nondeterministic" in trial.verdicts:
            outcome = "nondeterministic"
        record.count(record.forced, name, outcome, len(batch) if outcome == "pass" else 1)
        if outcome != "pass":
            record.note(name, outcome, self.where(batch, text))
        return outcome in ("fail", "wrong", "barred")


def _worst(verdicts: Sequence[str]) -> str:
    counts = Counter(verdicts)
    return next((v for v in ("wrong", "nondeterministic") if counts[v]), "pass")


def covered(symbol: str) -> bool:
    """Whether the tables have a row for it."""
    key = key_of(symbol)
    return key in rules.ALLOW or key in rules.DENY
