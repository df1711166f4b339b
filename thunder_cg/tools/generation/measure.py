"""Measures all variants of a model in one process, in turns: only ratios within one run count."""

from __future__ import annotations

import gc
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import thunder
import torch
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from thunder_cg.compat.torch_compile import forget_dynamic_sizes
from thunder_cg.kernels import executors
from thunder_cg.report.report import explain
from thunder_cg.tools.bench.variants import EAGER, OURS, OURS_FUSED, REDUCE_OVERHEAD, THUNDER, THUNDER_OWN
from thunder_cg.tools.generation.models import TRANSFORMERS, Compile, GeneratingModel
from thunder_cg.tools.measuring import backend_of, free_memory, frozen_objects, synchronize
from thunder_cg.tools.suite.language import vocabulary
from thunder_cg.tools.suite.measure import make_model
from thunder_cg.tools.workers import working_time
from thunder_cg.transform import cudagraph_transform

VARIANTS = (EAGER, THUNDER, THUNDER_OWN, REDUCE_OVERHEAD, OURS, OURS_FUSED)

SEED = 5
PROMPT = 16  # tokens
NEW = {"cuda": 128, "cpu": 8}  # tokens after it
WARM_UPS = 4  # generations that compile, warm up and capture prompt and token
ROUNDS = 7  # turns of each variant


@dataclass(slots=True)
class GenerationRow:
    """The results of one model in one variant.

    Attributes:
        tokens_per_second: of all rows of the batch, from the call of `generate` with the prompt to its return; a
            median. 0 where not measured.
        launches: of graphs, kernels and copies by the host for one token, those of the sampling too; 0 where not
            measured.
        first_s: seconds of the first generation, which compiles.
        digest: equal for equal tokens of the measured generations.
        failure: why there are no results, "" if there are.
        eager: reasons why calls ran without graphs, warm-ups aside, with how often each; "" if none did.
    """

    model: str
    package: str
    variant: str
    batch: int
    tokens_per_second: float = 0.0
    launches: float = 0.0
    first_s: float = 0.0
    digest: str = ""
    failure: str = ""
    eager: str = ""


class _PreparedVariant:
    """One variant of a model, which has compiled, warmed up and captured, and what it generates in its turns."""

    def __init__(self, entry: GeneratingModel, variant: str, device: torch.device, prompts: Sequence[Tensor]) -> None:
        self._row = GenerationRow(entry.name, entry.package, variant, entry.batch)
        self._device, self._new = device, NEW[device.type]
        self._seconds, self._found = list[float](), list[Tensor]()
        forget_dynamic_sizes()  # else sizes that varied in another variant are dynamic from the start
        self._generate, self._compiled = _prepared(entry, variant, device, self._new)
        start = working_time()
        self._generate(prompts[0])
        synchronize(device)
        self._row.first_s = working_time() - start
        for prompt in prompts[1:]:
            self._generate(prompt)
        free_memory(device)

    @property
    def variant(self) -> str:
        return self._row.variant

    def turn(self, prompt: Tensor) -> None:
        gc.collect()
        synchronize(self._device)
        start = time.perf_counter()
        self._found.append(self._generate(prompt))
        synchronize(self._device)
        self._seconds.append(time.perf_counter() - start)

    def row(self, prompt: Tensor) -> GenerationRow:
        """After all turns, because a profiler slows down what runs after it."""
        row, graphs = self._row, self.variant in (OURS, OURS_FUSED)
        row.digest = hashlib.sha256(b"".join(tokens.cpu().numpy().tobytes() for tokens in self._found)).hexdigest()[:16]
        row.eager = "; ".join(_eager(self._compiled)) if graphs else ""
        if self._device.type == "cuda":
            row.tokens_per_second = row.batch * self._new / median(self._seconds)
            if graphs:  # other variants launch so much that its analysis takes minutes
                row.launches = _launches(lambda: self._generate(prompt)) / self._new
        return row


def measure(
    entry: GeneratingModel,
    variants: Sequence[str],
    device: torch.device,
    begins: Callable[[str], None],
    ready: Callable[[], None],
) -> list[GenerationRow]:
    """The rows of a model, whose variants take turns: each generates from the same prompts, one in a round.

    Args:
        begins: called with the name of the variant that is at work from now on. What is raised is its failure.
        ready: called once all variants are prepared. It returns when nothing else runs on the machine.
    """
    torch.manual_seed(SEED)
    words, shape = vocabulary(device.type == "cpu"), (entry.batch, PROMPT)
    prompts = [torch.randint(3, words, shape).to(device) for _ in range(WARM_UPS + ROUNDS)]
    prepared: list[_PreparedVariant] = []
    for name in variants:
        begins(name)
        prepared.append(_PreparedVariant(entry, name, device, prompts[:WARM_UPS]))
    ready()
    with frozen_objects():
        for round, prompt in enumerate(prompts[WARM_UPS:]):
            first = round % len(prepared)
            for each in [*prepared[first:], *prepared[:first]]:
                begins(each.variant)
                each.turn(prompt)
    rows = []
    for each in prepared:
        begins(each.variant)
        rows.append(each.row(prompts[-1]))
    return rows


def _prepared(
    entry: GeneratingModel, variant: str, device: torch.device, new: int
) -> tuple[Callable[[Tensor], Tensor], list[Any]]:
    """What generates, and what the variant has compiled for that."""
    model = make_model(entry.make, device, SEED).eval().requires_grad_(False)
    compiler, compiled = _compiler(variant, entry, device), list[Any]()

    def compile(fn: Any) -> Any:
        assert compiler is not None
        compiled.append(compiler(fn))
        return compiled[-1]

    generating = entry.compile(model, compiler and compile)
    return lambda prompt: entry.generate(generating, prompt, new), compiled


def _eager(compiled: Sequence[Any]) -> Iterator[str]:
    reasons: Counter[str] = Counter()
    for function in compiled:
        for trace in explain(function).traces:
            reasons.update(trace.fallbacks)
    yield from (f"{times} x {reason}" for reason, times in reasons.most_common())


def _compiler(variant: str, entry: GeneratingModel, device: torch.device) -> Compile | None:
    graphs = cudagraph_transform(backend=backend_of(device))
    options: Mapping[str, Mapping[str, Any]] = {
        THUNDER: {},
        THUNDER_OWN: {"transforms": [CUDAGraphTransform()]},
        OURS: {"transforms": [graphs]},
        OURS_FUSED: {"transforms": [graphs], "executors": executors()},
    }
    if variant == EAGER:
        return lambda fn: fn
    if variant == REDUCE_OVERHEAD:
        return None
    if entry.package != TRANSFORMERS:
        return lambda model: thunder.jit(model, **options[variant])
    from thunder_cg.dynamo.compiler import compile_with  # it is slow to import

    # All have the cuts of `thunder_cg.thunderfx`: graphs are all that is different.
    return lambda fn: compile_with(fn, **options[variant])


_LAUNCHES = ("LaunchKernel", "GraphLaunch", "Memcpy", "Memset")


def _launches(run: Callable[[], object]) -> int:
    """How many kernels, graphs and copies the host launches."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    names = [event.name for event in found.events() if event.name.startswith("cu")]
    return sum(any(part in name for part in _LAUNCHES) for name in names)
