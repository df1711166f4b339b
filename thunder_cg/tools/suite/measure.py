"""Measures a model: Thunder without and with graphs, compared bit for bit, then timed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import thunder
import torch
from torch import Tensor, nn

from thunder_cg.compat.tensors import tree_leaves, tree_map
from thunder_cg.errors import WrongGradientWarning
from thunder_cg.report.report import Report, explain
from thunder_cg.tools.measuring import backend_of, deterministic_algorithms, free_memory, quiet_collector
from thunder_cg.tools.suite.counts import fill_counts
from thunder_cg.tools.suite.models import LEARNING_RATE, SuiteModel
from thunder_cg.tools.suite.results import FX, JIT, TRAINING, SuiteRow
from thunder_cg.tools.workers import failure_text
from thunder_cg.transform import cudagraph_transform
from thunder_cg.verify.compare import same_bits

STEPS = 5  # the first warms up, the second captures, the others replay, most of them on the fast path
ROUNDS = 3  # turns of each side
CALLS = 50  # synchronized steps in a turn, at most
TURN_SECONDS = 0.5  # after which a turn of slow steps ends
SEED = 7
NOWHERE, BACKWARD, EVERYWHERE = "nowhere", "in the backward", "everywhere"


class CompiledSide:
    """One compiled copy of the model, and its steps.

    Args:
        deterministic: where steps use deterministic kernels: see Note [Deterministic].
    """

    def __init__(
        self,
        entry: SuiteModel,
        mode: str,
        device: torch.device,
        path: str,
        transforms: Sequence[Any],
        deterministic: str = NOWHERE,
    ) -> None:
        self.trains = mode == TRAINING
        self._deterministic = deterministic
        model = make_model(entry.maker(mode), device, SEED).train(self.trains)
        if path == JIT:
            self.compiled: Any = thunder.jit(model, transforms=[*transforms])
            self.module: nn.Module = self.compiled
        else:
            from thunder_cg.dynamo.compiler import compile_with  # it is slow to import

            # Both sides have the cuts of `thunder_cg.thunderfx`: graphs are all that is different.
            self.compiled = compile_with(model, transforms=[*transforms])
            self.module = model
        self._sgd = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)

    def run(self, batch: Any) -> tuple[Any, Tensor | None]:
        """The output; in training, the loss as well, and gradients on the parameters."""
        with _deterministic(self._deterministic == EVERYWHERE):
            if not self.trains:
                with torch.no_grad():
                    return batch.call(self.compiled), None
            self._sgd.zero_grad()
            output = batch.call(self.compiled)
            loss = batch.loss(output)
            with _deterministic(self._deterministic != NOWHERE):
                loss.backward()
            return output, loss.detach()

    def results(self, batch: Any, seed: int) -> dict[str, Tensor]:
        """All results of a step from this seed, by name: outputs, loss, gradients and buffers."""
        torch.manual_seed(seed)
        output, loss = self.run(batch)
        found = {f"output {i}": t.detach() for i, t in enumerate(tree_leaves(_plain(output))) if isinstance(t, Tensor)}
        if not found:
            raise TypeError(f"a {type(output).__name__} came back, in which PyTorch's pytree finds no tensor")
        if loss is not None:
            found["loss"] = loss
            found |= {f"gradient of {n}": p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        return found | {f"buffer {n}": b for n, b in self.module.named_buffers()}

    def update_weights(self) -> None:
        if self.trains:
            self._sgd.step()


def make_model(make: Callable[[bool], nn.Module], device: torch.device, seed: int) -> nn.Module:
    """The model, with equal weights for equal seeds: tiny and float32 on a CPU, as published and bfloat16 on a GPU."""
    torch.manual_seed(seed)
    tiny = device.type == "cpu"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with device:
            return make(tiny).to(device)
    finally:
        torch.set_default_dtype(before)


def model_inputs(entry: SuiteModel, mode: str, device: torch.device) -> Iterator[Any]:
    """Fresh inputs of one shape, without end. Each iterator yields the same ones."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            batch = entry.batch_for(mode, device.type == "cpu")
        yield _to(batch, device)


def _to(batch: Any, device: torch.device) -> Any:
    """New tensors on the device; those of floating point in the dtype of the model."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        floats = value.is_floating_point() and device.type == "cuda"
        return value.to(device, torch.bfloat16 if floats else value.dtype, copy=True)

    return type(batch)(tree_map(moved, batch.args), tree_map(moved, batch.kwargs), moved(batch.labels))


def _plain(output: Any) -> Any:
    """An output that is a mapping, as a dict: not all packages register their mappings with pytree."""
    return {**output} if hasattr(output, "keys") else output


# ------------------------------------------------------------------------------------------------------ measurement


def measure(
    entry: SuiteModel,
    mode: str,
    device: torch.device,
    ready: Callable[[list[SuiteRow]], None] = lambda rows: None,
    begins: Callable[[str], None] = lambda stage: None,
) -> SuiteRow:
    """The row of a model. On a CPU nothing is timed.

    Args:
        ready: called before the timing with a list of the row so far. It returns when nothing else runs on the machine.
        begins: called with the name of each stage.
    """
    row = SuiteRow(entry.name, entry.package, mode)
    try:
        transforms = [cudagraph_transform(backend=backend_of(device))]
        pair, difference = _compared(entry, row, device, transforms, begins)
        fill_counts(row, pair.reports)
        row.agrees = _agreement(entry, row, device, transforms, difference)
        if device.type == "cuda":
            batch = pair.settle()
            ready([row])
            row.thunder_us, row.captured_us = pair.times(batch)
    except Exception as error:
        row.failure = failure_text(error)
    return row


def _agreement(entry: SuiteModel, row: SuiteRow, device: torch.device, transforms: list[Any], difference: str) -> str:
    """`SuiteRow.agrees` for the first difference. Where uncaptured Thunder varies, deterministic kernels decide."""
    if not difference:
        return "yes"
    first = varies = _Pair(entry, row, device, [], NOWHERE).difference()
    for where in (BACKWARD, EVERYWHERE):
        if not varies:
            break
        try:
            difference = _Pair(entry, row, device, transforms, where).difference()
            if not difference:
                return f"yes: with deterministic algorithms {where}"
            varies = _Pair(entry, row, device, [], where).difference()
        except Exception:
            continue  # Thunder, or Inductor's part of the model, does not run with these settings
        finally:
            free_memory(device)
    return f"Thunder varies: {first}" if varies else f"no: {difference}"


class ThunderError(Exception):
    """Uncaptured Thunder cannot run the model."""


def _compared(
    entry: SuiteModel, row: SuiteRow, device: torch.device, transforms: list[Any], begins: Callable[[str], None]
) -> tuple[_Pair, str]:
    """Thunder without and with graphs, and their first difference. The row gets how Thunder compiles the model."""
    failures: list[str] = []
    for path in (JIT, FX):
        row.path, row.not_jit = path, "".join(failures)
        try:
            return _compared_here(entry, row, device, transforms, begins)
        except (ThunderError, WrongGradientWarning) as error:
            failures.append(str(error)[:140])
        torch.compiler.reset()
        free_memory(device)
    row.path = row.not_jit = ""
    raise ThunderError(f"uncaptured, {JIT}: {failures[0]}; {FX}: {failures[1]}")


def _compared_here(
    entry: SuiteModel, row: SuiteRow, device: torch.device, transforms: list[Any], begins: Callable[[str], None]
) -> tuple[_Pair, str]:
    """`_compared` by the path of the row. Raises `WrongGradientWarning`, or `ThunderError` if Thunder alone fails."""
    begins(f"in uncaptured {row.path}")
    try:
        plain = CompiledSide(entry, row.mode, device, row.path, [])
        buffers = [(buffer, buffer.clone()) for buffer in plain.module.buffers()]
        plain.results(next(model_inputs(entry, row.mode, device)), SEED)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ThunderError(failure_text(error)) from error
    for buffer, before in buffers:
        buffer.detach().copy_(before)
    begins("with graphs")
    pair = _Pair(entry, row, device, transforms, NOWHERE, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error", WrongGradientWarning)
        return pair, pair.difference()


class _Pair:
    """Uncaptured Thunder and a copy with other transforms, with equal weights and inputs.

    Args:
        plain: uncaptured Thunder, if it is there.
    """

    def __init__(
        self,
        entry: SuiteModel,
        row: SuiteRow,
        device: torch.device,
        transforms: list[Any],
        deterministic: str,
        plain: CompiledSide | None = None,
    ) -> None:
        make = partial(CompiledSide, entry, row.mode, device, row.path, deterministic=deterministic)
        self._sides = [plain or make(transforms=[]), make(transforms=transforms)]
        self._batches = [model_inputs(entry, row.mode, device) for _ in self._sides]
        self._device = device
        self._explains = bool(transforms)
        self.reports: list[Report] = []  # before the last step and after it

    def difference(self) -> str:
        """The first difference in a few steps, "" if there is none."""
        plain, other = self._sides
        first = ""
        for step in range(STEPS):
            mine, others = (next(each) for each in self._batches)
            expected = plain.results(mine, SEED + step)
            if step == STEPS - 1:
                self._report()
            found = other.results(others, SEED + step)
            first = first or _first_difference(expected, found, step)
            plain.update_weights()
            other.update_weights()
        self._report()
        return first

    def _report(self) -> None:
        if self._explains:
            self.reports.append(explain(self._sides[1].compiled))

    def settle(self) -> Any:
        """Runs both sides on one batch until they are in their steady state, and returns the batch."""
        batch = next(self._batches[0])
        for side in self._sides:
            for _ in range(STEPS):
                side.run(batch)
        torch.cuda.synchronize(self._device)
        free_memory(self._device)  # other models need memory while this one waits for its turn
        return batch

    def times(self, batch: Any) -> tuple[float, float]:
        """Medians of synchronized steps, microseconds, of the two sides in turns."""
        samples: list[list[float]] = [[] for _ in self._sides]
        with quiet_collector():
            for side, times in [*zip(self._sides, samples)] * ROUNDS:
                for _ in range(3):
                    side.run(batch)
                torch.cuda.synchronize(self._device)
                end = time.perf_counter() + TURN_SECONDS
                for _ in range(CALLS):
                    start = time.perf_counter()
                    if start > end:
                        break
                    side.run(batch)
                    torch.cuda.synchronize(self._device)
                    times.append((time.perf_counter() - start) * 1e6)
        return median(samples[0]), median(samples[1])


def _first_difference(expected: dict[str, Tensor], found: dict[str, Tensor], step: int) -> str:
    for name in expected.keys() | found.keys():
        if name not in expected or name not in found:
            return f"{name} of step {step} is only there {'with' if name in found else 'without'} graphs"
    for name, a in expected.items():
        b = found[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} of step {step} is {b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}"
        if not same_bits(a, b):
            return f"{name} of step {step}, by up to {float((a.double() - b.double()).abs().max()):.3g}"
    return ""


# Note [Deterministic]
# Some kernels add in no fixed order, most of them in backwards. `torch.use_deterministic_algorithms` replaces them, but
# Dynamo guards on it: some models that thunderfx compiles without it fail in Thunder with it, and code that Inductor
# compiled without it does not run its backward with it. So a model first runs without it. If two runs of uncaptured
# Thunder differ, it runs with it in the backward only, and then with it in the whole step.


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    if not on:
        yield
        return
    before, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        with deterministic_algorithms(warn_only=True):
            yield
    finally:
        torch.backends.cudnn.deterministic = before
