"""The demo: trains and samples one small GPT twice from one seed, without CUDA graphs and with them.

Each run draws its own dropout masks and samples, updates its own weights and writes its own caches, so one wrong bit
spreads to all later results. The demo compares each loss, each parameter and each character.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import thunder
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_cg import cudagraph_transform, explain
from thunder_cg.progress import Progress
from thunder_cg.tools.measuring import backend_of, deterministic_algorithms, one_thread, synchronize
from thunder_cg.verify.compare import bits, same_bits

SEED = 1337
PROMPT = "def "
TEMPERATURE = 0.8
# The first calls compile, warm up and capture, and are not timed. The other calls are timed in groups.
UNTIMED = 3
TICKS = 10
PLAN_LINES = 40
SHOWN_DIFFERENCES = 20
TAPE_NOTE = "  The tape replays on the CPU, one operator at a time: it checks the plan and saves no time."
BUG = "This is a bug in thunder_cg; please report it with the output above."


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """The sizes of the demo: a model of `layers` x `width`, trained for `steps` on `batch` x `context` characters.

    The model then writes `context - len(PROMPT)` characters, which fills its cache.
    """

    device: torch.device
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    dropout: float = 0.1

    @property
    def backend(self) -> str:
        return backend_of(self.device)


@dataclass(frozen=True, slots=True)
class DemoRun:
    """The results of a run, and its times: milliseconds per training step and per character."""

    losses: tuple[Tensor, ...]
    parameters: dict[str, Tensor]
    text: str
    step_ms: float
    character_ms: float
    step: Any = field(repr=False)  # the compiled functions, for `explain`
    decode: Any = field(repr=False)


def settings_for(device: torch.device) -> DemoSettings:
    """On a CPU, a model that two cores train in seconds; on a GPU, a model that is bound by launches."""
    if device.type == "cuda":
        return DemoSettings(device, layers=4, width=384, heads=6, context=256, batch=8, steps=100)
    return DemoSettings(device, layers=2, width=64, heads=4, context=64, batch=8, steps=60)


# ---------------------------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """A pre-norm transformer block in two halves: training and decoding differ in the attention between them."""

    def __init__(self, settings: DemoSettings) -> None:
        super().__init__()
        width = settings.width
        self.heads = settings.heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(settings.dropout)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, length, width) to queries, keys and values, each (batch, heads, length, width / heads)."""
        batch, length, width = x.shape
        parts = self.query_key_value(self.before_attention(x)).split(width, dim=2)
        query, key, value = (p.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        return query, key, value

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Adds the attention's result and then the MLP's to `x`."""
        batch, length, width = x.shape
        x = x + self.dropout(self.projection(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.before_mlp(x)))))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        return self.finish(x, F.scaled_dot_product_attention(query, key, value, is_causal=True))


class CharacterGPT(nn.Module):
    """A character-level GPT. A call returns the loss."""

    def __init__(self, settings: DemoSettings, vocabulary: int, *, bias: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, settings.width)
        self.positions = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, vocabulary, bias=bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; `tokens` and `targets` are int64, (batch, context)."""
        logits = self.logits(self.tokens(tokens) + self.positions.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def logits(self, x: Tensor) -> Tensor:
        """(batch, length, width) to (batch, length, vocabulary)."""
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Cache(nn.Module):
    """Keys and values of one layer for all positions, written in place: addresses and shapes never change."""

    keys: Tensor
    values: Tensor

    def __init__(self, settings: DemoSettings) -> None:
        super().__init__()
        shape = (1, settings.heads, settings.context, settings.width // settings.heads)
        self.register_buffer("keys", torch.zeros(shape))
        self.register_buffer("values", torch.zeros(shape))

    def forward(self, position: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        return self.keys, self.values


class Decoder(nn.Module):
    """Samples the next character with the weights of a trained GPT, one position at a time."""

    places: Tensor

    def __init__(self, model: CharacterGPT, settings: DemoSettings) -> None:
        super().__init__()
        self.model = model
        self.caches = nn.ModuleList(Cache(settings) for _ in model.blocks)
        self.register_buffer("places", torch.arange(settings.context))

    def forward(self, token: Tensor, position: Tensor) -> tuple[Tensor, int]:
        """The character after `token`, both int64, (1,): as a tensor to feed back and as a number to print.

        The position is a tensor, so that one graph serves all positions; a number would be a constant of the graph.
        `.item()` waits for the GPU, which a graph cannot do: it is the only op here that stays eager.
        """
        logits = self.logits(token, position).flatten()
        chosen = torch.multinomial(torch.softmax(logits / TEMPERATURE, dim=0), 1)
        number: Any = chosen.item()
        return chosen, number

    def logits(self, token: Tensor, position: Tensor) -> Tensor:
        """Those after `token`, (1, 1, vocabulary)."""
        x = (self.model.tokens(token) + self.model.positions(position)).unsqueeze(0)
        seen = (self.places <= position).view(1, 1, 1, -1)
        block: Any  # nn.ModuleList knows its items as modules only
        for block, cache in zip(self.model.blocks, self.caches, strict=True):
            query, key, value = block.project(x)
            keys, values = cache(position, key, value)
            x = block.finish(x, F.scaled_dot_product_attention(query, keys, values, attn_mask=seen))
        logits: Tensor = self.model.head(self.model.norm(x))
        return logits


# ----------------------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as numbers. `vocabulary[n]` is the character whose number is n; `encoded` is int64, one per character."""

    vocabulary: str
    encoded: Tensor

    @classmethod
    def of(cls, text: str, device: torch.device) -> Corpus:
        vocabulary = "".join(sorted(set(text)))
        numbers = {character: number for number, character in enumerate(vocabulary)}
        return cls(vocabulary, torch.tensor([numbers[character] for character in text], device=device))

    def batch(self, settings: DemoSettings, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows of the text and the same windows one character on, each (batch, context)."""
        starts = torch.randint(len(self.encoded) - settings.context, (settings.batch, 1), generator=generator)
        windows = (starts + torch.arange(settings.context)).to(self.encoded.device)
        return self.encoded[windows], self.encoded[windows + 1]


def package_source() -> str:
    """All Python source of this package, in the order of its paths. Every installation has this text."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


# ------------------------------------------------------------------------------------------------------------- two runs


def train_and_write(
    model: CharacterGPT, corpus: Corpus, settings: DemoSettings, progress: Progress, transforms: Sequence[Any]
) -> DemoRun:
    """One run: trains `model` in place and lets it write, both compiled with `transforms`."""
    how = "with graphs" if transforms else "without graphs"
    torch.manual_seed(SEED)
    step = thunder.jit(model, transforms=[*transforms])
    losses, step_ms = train(step, corpus, settings, Clock(settings.device, progress, f"training {how}"))
    decode = thunder.jit(Decoder(model, settings).to(settings.device).eval(), transforms=[*transforms])
    text, character_ms = write(decode, corpus, settings, Clock(settings.device, progress, f"writing {how}"))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return DemoRun(losses, parameters, text, step_ms, character_ms, step, decode)


def train(
    step: Any, corpus: Corpus, settings: DemoSettings, clock: Clock, seed: int = SEED
) -> tuple[tuple[Tensor, ...], float]:
    """The losses of all steps, kept as the tensors that the model returned, and milliseconds per step.

    Args:
        seed: of the batches that are drawn.
    """
    optimizer = torch.optim.AdamW(step.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(settings.steps):
        loss = step(*corpus.batch(settings, generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        clock.tick()
    return tuple(losses), clock.milliseconds()


@torch.no_grad()
def write(decode: Any, corpus: Corpus, settings: DemoSettings, clock: Clock) -> tuple[str, float]:
    """The text that the model writes after the prompt until its cache is full, and milliseconds per character."""
    prompt = (torch.tensor([corpus.vocabulary.index(character)], device=settings.device) for character in PROMPT)
    position = torch.zeros(1, dtype=torch.int64, device=settings.device)
    token, *given = prompt
    written = []
    for _ in range(settings.context):
        chosen, number = decode(token, position)
        position += 1
        if given:
            token, *given = given
        else:
            token = chosen
            written.append(corpus.vocabulary[number])
        clock.tick()
    return "".join(written), clock.milliseconds()


class Clock:
    """Milliseconds per tick: the median over groups of `TICKS` ticks. It waits for the GPU once in a group only.

    It shows its ticks on `progress`, also once in a group only, so that the times are hardly changed.
    """

    def __init__(self, device: torch.device, progress: Progress, stage: str) -> None:
        self.device = device
        self.progress = progress
        self.stage = stage
        self.ticks = 0
        self.shown = 0
        self.times: list[float] = []
        progress.show(f"{stage}: compiling")

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks >= UNTIMED and (self.ticks - UNTIMED) % TICKS == 0:
            synchronize(self.device)
            self.times.append(time.perf_counter())
            self._show()

    def _show(self) -> None:
        self.progress.tick(self.stage, self.ticks - self.shown)
        self.shown = self.ticks

    def milliseconds(self) -> float:
        """NaN if there was no whole group."""
        self._show()
        groups = [(after - before) / TICKS * 1e3 for before, after in pairwise(self.times)]
        return median(groups) if groups else math.nan


# ----------------------------------------------------------------------------------------------------------- comparison


def differences(plain: DemoRun, captured: DemoRun) -> list[str]:
    """The results that are not equal in every bit, one line each."""
    found = []
    for number, (a, b) in enumerate(zip(plain.losses, captured.losses, strict=True), 1):
        if not same_bits(a, b):
            found.append(f"loss of step {number}: {a.item()!r} without graphs, {b.item()!r} with")
    for name, a in plain.parameters.items():
        b = captured.parameters[name]
        if not same_bits(a, b):
            unlike = int((bits(a) != bits(b)).sum())
            furthest = float((a - b).abs().max())
            found.append(f"parameter {name}: {unlike} of {a.numel()} elements differ, by up to {furthest:.3g}")
    for place, (x, y) in enumerate(zip(plain.text, captured.text, strict=True), 1):
        if x != y:
            found.append(f"character {place}: {x!r} without graphs, {y!r} with")
    return found


# --------------------------------------------------------------------------------------------------------------- output


def run(settings: DemoSettings) -> int:
    """Runs the demo and prints its results. Returns 0, or 1 if the two runs differ in one bit."""
    with deterministic():
        torch.manual_seed(SEED)
        corpus = Corpus.of(package_source(), settings.device)
        model = CharacterGPT(settings, len(corpus.vocabulary)).to(settings.device)
        print_lines(_introduction(settings, corpus))
        progress = Progress(2 * (settings.steps + settings.context))
        plain = train_and_write(copy.deepcopy(model), corpus, settings, progress, [])
        captured = train_and_write(model, corpus, settings, progress, [cudagraph_transform(backend=settings.backend)])
        progress.clear()
        found = differences(plain, captured)
    print_lines(plan("the training step", captured.step))
    print_lines(plan("writing a character", captured.decode))
    print_lines(_captured(captured))
    print_lines(_times(settings, plain, captured))
    print_lines(_verdict(plain, captured, found))
    return 1 if found else 0


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, kernels add in a fixed order. Otherwise two runs of one program differ, with graphs and without."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it; cuBLAS reads it at its first use
    with deterministic_algorithms(), one_thread():
        yield


def _introduction(settings: DemoSettings, corpus: Corpus) -> Iterator[str]:
    kind = "CUDA graphs" if settings.backend == "cuda" else "no GPU: the tape backend stands in for CUDA graphs"
    yield f"A character-level GPT, {settings.layers} layers x {settings.width}, on {settings.device} ({kind})"
    yield f"  text   {len(corpus.encoded):,} characters of this package's source, {len(corpus.vocabulary)} different"
    yield f"  train  {settings.steps} steps of {settings.batch} x {settings.context} characters, AdamW, dropout"
    yield f"  write  {settings.context} positions; keys and values cached in place, each sample read with .item()"
    yield "  twice  from one seed: with plain thunder.jit, and with cudagraph_transform()"


def plan(what: str, compiled: Any) -> Iterator[str]:
    lines = str(explain(compiled)).splitlines()
    yield ""
    yield f"Plan of {what} (print(explain(fn)))"
    yield from (f"  {line}".rstrip() for line in lines[:PLAN_LINES])
    if len(lines) > PLAN_LINES:
        yield f"  ... and {len(lines) - PLAN_LINES} more lines"


def _captured(captured: DemoRun) -> Iterator[str]:
    yield ""
    yield f"{'Captured':24}{'regions':>10}{'captures':>10}{'replays':>10}{'eager ops':>11}{'calls':>8}{'fallbacks':>11}"
    for what, compiled in (("training", captured.step), ("writing", captured.decode)):
        for trace in explain(compiled).traces:
            captures = sum(region.captures for region in trace.regions)
            replays = sum(region.replays for region in trace.regions)
            yield (
                f"  {f'{what}, {trace.kind}':22}{len(trace.regions):10,}{captures:10,}{replays:10,}"
                f"{trace.counts['eager']:11,}{trace.calls:8,}{sum(trace.fallbacks.values()):11,}"
            )


def _times(settings: DemoSettings, plain: DemoRun, captured: DemoRun) -> Iterator[str]:
    yield ""
    yield f"{'Milliseconds':24}{'without':>10}{'with':>10}{'ratio':>10}"
    rows = (
        ("training step", plain.step_ms, captured.step_ms),
        ("character written", plain.character_ms, captured.character_ms),
    )
    for what, without, with_graphs in rows:
        yield f"  {what:22}{without:10.2f}{with_graphs:10.2f}{without / with_graphs:9.2f}x"
    if settings.backend == "tape":
        yield TAPE_NOTE


def _verdict(plain: DemoRun, captured: DemoRun, found: Sequence[str]) -> Iterator[str]:
    yield ""
    yield "Written"
    yield from (f"  | {line}" for line in (PROMPT + captured.text).splitlines())
    yield ""
    total = f"{len(plain.losses)} losses, {len(plain.parameters)} parameters and {len(plain.text)} characters"
    if not found:
        yield f"Agreement: {total} are the same with and without graphs, bit for bit."
        return
    yield f"DISAGREEMENT: of {total}, {len(found)} differ with graphs from without:"
    yield from (f"  {line}" for line in found[:SHOWN_DIFFERENCES])
    if len(found) > SHOWN_DIFFERENCES:
        yield f"  ... and {len(found) - SHOWN_DIFFERENCES} more"
    yield BUG


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)
