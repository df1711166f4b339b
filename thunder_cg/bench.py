"""The benchmark: one model under eager PyTorch, Thunder, Thunder's own CUDA graphs, this package, and the floor.

The floor is the model's eager kernels in one hand-made CUDA graph with nothing around its replay. All variants of a
model are measured in one process, in turns, so that what is compared saw the same machine: ratios count, not
microseconds.
"""

from __future__ import annotations

import gc
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import thunder
import torch
import torch.nn.functional as F
from thunder.transforms.cudagraph import CUDAGraphTransform
from torch import Tensor, nn

from thunder_cg.demo import Block, Settings
from thunder_cg.transform import cudagraph_transform

ROUNDS = 5  # turns that every variant gets
Step = Callable[[], Any]


class Mlp(nn.Module):
    """16 residual layers of width 64: host-bound."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


class Gpt(nn.Module):
    """12 layers; logits for tokens, the loss if targets are given."""

    def __init__(self, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        settings = Settings(torch.device("cpu"), 12, width, heads, context, 1, 0, dropout=0.0)
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(12))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its inputs. ``trains``: a call is a forward and a backward."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[torch.device], tuple[Tensor, ...]]
    trains: bool
    dtype: torch.dtype = torch.bfloat16


def _tokens(count: int, rows: int, length: int, vocabulary: int) -> Callable[[torch.device], tuple[Tensor, ...]]:
    return lambda device: tuple(
        torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(i)).to(device)
        for i in range(count)
    )


CASES = (
    Case("MLP, 16 layers, width 64, batch 8", Mlp, lambda d: (torch.randn(8, 64, device=d),), False, torch.float32),
    Case("GPT, width 128, 1 x 16 tokens", lambda: Gpt(128, 4, 512, 128), _tokens(1, 1, 16, 512), False),
    Case("GPT, width 768, 1 x 64 tokens", lambda: Gpt(768, 12, 50304, 512), _tokens(1, 1, 64, 50304), False),
    Case("GPT, width 768, training 2 x 128 tokens", lambda: Gpt(768, 12, 50304, 512), _tokens(2, 2, 128, 50304), True),
    Case(
        "GPT, width 768, training 16 x 512 tokens", lambda: Gpt(768, 12, 50304, 512), _tokens(2, 16, 512, 50304), True
    ),
)


@dataclass(slots=True)
class Row:
    """One variant of one case: microseconds per call, MB over the model; ``error`` if it did not run."""

    case: str
    variant: str
    host_p50: float = 0.0
    host_p99: float = 0.0
    end_to_end_p50: float = 0.0
    end_to_end_p99: float = 0.0
    back_to_back: float = 0.0
    allocated_mb: float = 0.0
    reserved_mb: float = 0.0
    error: str = ""


def _plain(model: nn.Module) -> Any:
    return model


def _thunder(model: nn.Module) -> Any:
    return thunder.jit(model)


def _thunder_own(model: nn.Module) -> Any:
    return thunder.jit(model, transforms=[CUDAGraphTransform()])


def _ours(model: nn.Module) -> Any:
    return thunder.jit(model, transforms=[cudagraph_transform()])


VARIANTS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": _plain,
    "thunder": _thunder,
    "thunder + CUDAGraphTransform": _thunder_own,
    "thunder_cg": _ours,
}
FLOOR = "hand-made graph"


def _step(case: Case, model: Any, inputs: tuple[Tensor, ...]) -> Step:
    if not case.trains:

        def infer() -> Any:
            with torch.no_grad():
                return model(*inputs)

        return infer
    parameters = list(model.parameters())

    def train() -> Any:
        for parameter in parameters:
            parameter.grad = None
        loss = model(*inputs)
        loss.backward()
        return loss.detach()

    return train


def _hand_made(case: Case, model: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    """The eager kernels of a step in one graph; its gradients stay in the graph's memory."""
    step = _step(case, model, inputs)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()

    def replay(alive: Any = (model, inputs)) -> None:
        """A graph does not keep alive what it reads."""
        graph.replay()

    return replay


@contextmanager
def _quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Variant:
    """One variant, prepared, with all its samples."""

    def __init__(self, case: Case, name: str, device: torch.device) -> None:
        self.row = Row(case.name, name)
        self.host: list[float] = []
        self.end_to_end: list[float] = []
        self.back_to_back: list[float] = []
        self._cuda = device.type == "cuda"
        torch.manual_seed(0)
        model = case.model().to(device, case.dtype)
        inputs = case.inputs(device)
        self._start_memory()
        if name == FLOOR:
            self.step = _hand_made(case, model, inputs)
        else:
            self.step = _step(case, VARIANTS[name](model), inputs)
        for _ in range(6):
            self.step()
        self.sync()
        self._stop_memory()

    def sync(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _start_memory(self) -> None:
        if self._cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def _stop_memory(self) -> None:
        if self._cuda:
            self.row.allocated_mb = (torch.cuda.max_memory_allocated() - self._before[0]) / 1e6
            self.row.reserved_mb = (torch.cuda.max_memory_reserved() - self._before[1]) / 1e6

    def measure(self, calls: int) -> None:
        """Synchronised calls, then as many back to back."""
        for _ in range(3):
            self.step()
        self.sync()
        with _quiet_collector():
            for _ in range(calls):
                start = time.perf_counter()
                self.step()
                returned = time.perf_counter()
                self.sync()
                done = time.perf_counter()
                self.host.append((returned - start) * 1e6)
                self.end_to_end.append((done - start) * 1e6)
            start = time.perf_counter()
            for _ in range(calls):
                self.step()
            self.sync()
            self.back_to_back.append((time.perf_counter() - start) / calls * 1e6)

    def finish(self) -> Row:
        row = self.row
        row.host_p50, row.host_p99 = median(self.host), quantiles(self.host, n=100)[98]
        row.end_to_end_p50, row.end_to_end_p99 = median(self.end_to_end), quantiles(self.end_to_end, n=100)[98]
        row.back_to_back = median(self.back_to_back)
        return row


def measure_case(case: Case, device: torch.device, calls: int) -> list[Row]:
    """All variants of one case, in turns. A variant that does not run becomes a row that says why."""
    names = [*VARIANTS, FLOOR] if device.type == "cuda" else ["eager", "thunder", "thunder_cg"]
    variants, rows = [], []
    for name in names:
        try:
            variants.append(Variant(case, name, device))
        except Exception as error:
            rows.append(Row(case.name, name, error=f"{type(error).__name__}: {error}".splitlines()[0]))
    for _ in range(ROUNDS):
        for variant in variants:
            variant.measure(calls)
    return [variant.finish() for variant in variants] + rows


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, one table per case."""
    lines: list[str] = []
    for case in dict.fromkeys(row.case for row in rows):
        lines += ["", f"**{case}**", ""]
        lines.append("| variant | host p50 / p99 µs | end to end p50 / p99 µs | back to back µs | MB |")
        lines.append("| --- | --- | --- | --- | --- |")
        for row in rows:
            if row.case == case and row.error:
                lines.append(f"| {row.variant} | {row.error} | | | |")
            elif row.case == case:
                lines.append(
                    f"| {row.variant} | {row.host_p50:.0f} / {row.host_p99:.0f} | "
                    f"{row.end_to_end_p50:.0f} / {row.end_to_end_p99:.0f} | "
                    f"{row.back_to_back:.0f} | {row.reserved_mb:.0f} |"
                )
    return "\n".join(lines[1:])


def environment(device: torch.device) -> dict[str, str]:
    """What the numbers were measured on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "thunder": thunder.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def run(device: torch.device, calls: int, output: Path | None, only: str = "") -> int:
    """Measures every case whose name holds ``only``, prints the tables, writes JSON to ``output``."""
    cases = [case for case in CASES if only in case.name]
    if device.type != "cuda":
        cases = [case for case in cases if "768" not in case.name]
    rows: list[Row] = []
    for case in cases:
        found = measure_case(case, device, calls)
        rows += found
        print(table(found), flush=True)
        gc.collect()
    if output is not None:
        output.write_text(json.dumps({**environment(device), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0
