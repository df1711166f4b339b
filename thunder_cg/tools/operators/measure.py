"""Measures some samples of a case: under the rules, and with each denied symbol captured by force."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from thunder_cg.analysis import rules
from thunder_cg.analysis.rules import Key
from thunder_cg.tools.measuring import free_memory, synchronize
from thunder_cg.tools.operators.cases import cases
from thunder_cg.tools.operators.samples import DRAWS, OperatorCase, SampledCall, calls, symbol_of
from thunder_cg.tools.operators.trial import CaptureTrial, NotTraced, attempt, capture_alone

SHOWN = 3  # failures after which a symbol is not captured by force any more
SINGLY = 4  # samples that are captured by force one by one, before the others are captured together


@dataclass(frozen=True, slots=True, order=True)
class OperatorTask:
    """The samples of a case from `start` to `stop`."""

    start: int
    case: str
    stop: int

    @property
    def name(self) -> str:
        return f"{self.case} [{self.start}:{self.stop}]"


@dataclass(slots=True)
class OperatorRecord:
    """The results of a task.

    Attributes:
        total: how many samples the case has. Of them, `tried` are in this task; Thunder compiled and ran `traced` of
            these, and `differentiated` with their backward.
        stale: samples that have no second set of values.
        untraced, undifferentiated: why Thunder does not compile samples, and how many.
        symbols: by symbol, how often each outcome was seen, such as "forward pass", "backward wrong", "forward
            nondeterministic", "forward fail". "forward barred": the run time refused the graph, for no symbol in
            particular. "forced ...": a denied symbol was captured by force; it is "barred" if `allow=` does not capture
            it. "alone ...": a call that Thunder does not compile was captured without Thunder.
        notes: by symbol and outcome other than "pass", the first sample.
        crash: why the worker process failed, "" if it did not.
        forcing: the symbol whose forced capture is under way, "" if there is none.
    """

    task: OperatorTask
    total: int = 0
    tried: int = 0
    traced: int = 0
    differentiated: int = 0
    stale: int = 0
    untraced: Counter[str] = field(default_factory=Counter)
    undifferentiated: Counter[str] = field(default_factory=Counter)
    symbols: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    notes: dict[str, str] = field(default_factory=dict)
    crash: str = ""
    forcing: str = ""

    @property
    def is_forced(self) -> bool:
        """Whether a symbol was captured that the rules deny."""
        ends = {(key_of(symbol), end.split()[0]) for symbol, counts in self.symbols.items() for end in counts}
        denied = {key for key, rule in rules.RULES.items() if not rule.captures}
        return any(how == "forced" or (how == "alone" and key in denied) for key, how in ends)

    def end(self, failure: str) -> None:
        """Ends the record. If the process failed in a forced capture, the failure is the outcome of that capture."""
        if failure and self.forcing:
            self.symbols[self.forcing]["forced fail"] += 1
            self.note(self.forcing, "fail", f"{self.task.name}: {failure}")
        else:
            self.crash = failure
        self.forcing = ""

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


def measure(task: OperatorTask, device: str) -> Iterator[OperatorRecord]:
    """Measures a task. It yields the record each time that it has grown, so that a crash loses little."""
    case = cases(device)[task.case]
    every = list(enumerate(_calls(task.case, device, False)))
    mine = every[task.start : task.stop]
    record = OperatorRecord(task, total=len(every), tried=len(mine), stale=sum(call.is_stale for _, call in mine))
    forward = _CaseMeasurement(case, device, False, record)
    eager = forward.as_decided(mine)
    yield record
    if case.differentiable:
        graded = list(enumerate(_calls(task.case, device, True)))
        backward = _CaseMeasurement(case, device, True, record)
        traced = [graded[number] for number, _ in mine if number not in forward.untraced and number < len(graded)]
        eager_with_gradients = backward.as_decided(traced)
        yield record
        backward.untraced |= dict(graded[number] for number in forward.untraced if number < len(graded))
        for _ in backward.by_force({key: some for key, some in eager_with_gradients.items() if key not in eager}):
            yield record
        backward.alone()
    for _ in forward.by_force(eager):
        yield record
    forward.alone()
    synchronize(torch.device(device))
    free_memory(torch.device(device))  # compiled functions are in reference cycles, and hold some of it
    yield record


@lru_cache(maxsize=2)
def _calls(name: str, device: str, grad: bool) -> list[SampledCall]:
    return calls(cases(device)[name], device, grad)


Numbered = list[tuple[int, SampledCall]]


@dataclass(slots=True)
class _CaseMeasurement:
    case: OperatorCase
    device: str
    grad: bool
    record: OperatorRecord
    untraced: dict[int, SampledCall] = field(default_factory=dict)

    def attempt(self, numbered: Sequence[tuple[int, SampledCall]], allow: Sequence[str] = ()) -> CaptureTrial:
        some = [call for _, call in numbered]
        alone = some * 2 if len(some) == 1 else some  # a region needs two kernels
        return attempt(alone, self.device, self.grad, allow, self.case.executors)

    def as_decided(self, numbered: Numbered) -> dict[Key, Numbered]:
        """Captures under the rules. Returns the symbols that stayed eager, and their samples."""
        eager: defaultdict[Key, Numbered] = defaultdict(list)
        waiting = [numbered] if numbered else []
        reason = ""
        while waiting:
            batch = waiting.pop()
            try:
                trial = self.attempt(batch)
            except NotTraced as error:
                if len(batch) > 1:
                    again, reason = str(error) == reason, str(error)
                    waiting += [[one] for one in reversed(batch)] if again else _halves(batch)
                    continue
                found = self.last_try(batch, error)
                if found is None:
                    continue
                trial = found
            if not trial.clean and len(batch) > 1:
                waiting += _halves(batch)
                continue
            self.take(trial, batch)
            for key in trial.eager:
                eager[key] += batch
        return eager

    def last_try(self, batch: Numbered, error: NotTraced) -> CaptureTrial | None:
        """Tries a sample with one set of values only: its permuted values may be no valid arguments."""
        ((number, call),) = batch
        if error.draw == 0:
            self.not_traced(number, call, error)
            return None
        batch[0] = (number, replace(call, draws=call.draws[:1] * DRAWS))
        try:
            trial = self.attempt(batch)
        except NotTraced as again:
            self.not_traced(number, call, again)
            return None
        self.record.stale += 1
        return trial

    def not_traced(self, number: int, call: SampledCall, error: NotTraced) -> None:
        self.untraced[number] = call
        reasons = self.record.undifferentiated if self.grad else self.record.untraced
        reasons[str(error)] += 1

    def take(self, trial: CaptureTrial, batch: Numbered) -> None:
        record = self.record
        if self.grad:
            record.differentiated += len(batch)
        else:
            record.traced += len(batch)
        if trial.failure is not None:
            blamed, text = trial.failure
            end = "barred" if blamed is None and "CaptureRefused" in text else "fail"
            keys = trial.eager if blamed is None else [blamed]
            for symbol in [*map(label, keys)] or [self.case.symbol or "sweep.unknown"]:
                record.symbols[symbol][f"forward {end}"] += 1
                record.note(symbol, end, self.where(batch, text))
        if trial.unfit:
            record.note(self.case.name, "not replayed", self.where(batch, trial.unfit))
        outcome = next((each for each in ("wrong", "nondeterministic") if each in trial.verdicts), "pass")
        for kind, counts in trial.captured.items():
            for key, many in counts.items():
                record.symbols[label(key)][f"{kind} {outcome}"] += many
                if outcome != "pass":
                    record.note(label(key), outcome, self.where(batch, ""))

    def where(self, batch: Numbered, text: str) -> str:
        number = batch[0][0]
        gradients = " with gradients" if self.grad else ""
        return f"{self.case.name}[{number}]{gradients}" + (f": {text}" if text else "")

    def by_force(self, eager: Mapping[Key, Numbered]) -> Iterator[None]:
        """Captures symbols by force. Yields before each symbol and at the end."""
        for key, numbered in eager.items():
            self.record.forcing = label(key)
            yield
            singly, rest = numbered[:SINGLY], numbered[SINGLY:]
            shown = 0
            for one in singly:
                shown += self.force(key, [one])
                if shown == SHOWN:
                    break
            else:
                if rest and not shown:
                    self.force(key, rest)
        self.record.forcing = ""
        yield

    def force(self, key: Key, batch: Numbered) -> bool:
        """Captures a denied symbol. Returns whether that failed, gave wrong results, or could not be tried."""
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
        elif key in trial.eager or trial.unfit:
            outcome, text = "barred", trial.eager.get(key, trial.unfit)
        elif "nondeterministic" in trial.verdicts:
            outcome = "nondeterministic"
        record.symbols[name][f"forced {outcome}"] += len(batch) if outcome == "pass" else 1
        if outcome != "pass":
            record.note(name, outcome, self.where(batch, text))
        return outcome in ("fail", "wrong", "barred")

    def alone(self) -> None:
        """Captures without Thunder the calls that Thunder does not compile."""
        symbol = symbol_of(f"{self.case.symbol}_vjp") if self.grad else self.case.symbol
        shown = 0
        for number, call in [*self.untraced.items()][: SINGLY if symbol else 0]:
            found = capture_alone(call, self.device, self.grad) if shown < SHOWN else None
            if found is None:
                continue
            outcome, text = found
            self.record.symbols[symbol][f"alone {outcome}"] += 1
            if outcome != "pass":
                shown += 1
                self.record.note(symbol, outcome, self.where([(number, call)], text))


def _halves(batch: Numbered) -> list[Numbered]:
    """Two halves, the first one last: the caller takes batches from the end."""
    return [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
