"""The cases on several ranks: a model and how the ranks share it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from thunder_cg.tools.bench.cases import BenchmarkCase, numbers, resnet_training, tokens_and_targets
from thunder_cg.tools.bench.models import Gpt, GptDecode, Llama
from thunder_cg.tools.bench.parallel import DDP, TENSOR, ZERO2, ZERO3

GPT_LAYERS, LLAMA_LAYERS, QUICK_LAYERS = 12, 16, 3
TOKENS = ((2, 128), (8, 512))  # batch and length of each GPT case


@dataclass(frozen=True, slots=True)
class RankCase:
    """A model with one rank's inputs, and the parallelism. `case` cannot be pickled."""

    case: BenchmarkCase
    parallel: str
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.parallel}"


def rank_cases(device: torch.device, quick: bool) -> Iterator[RankCase]:
    """The cases for GPUs, or small ones for a CPU.

    Args:
        quick: the smallest one, with the most usual kinds of parallelism.
    """
    if device.type == "cpu":
        yield from (RankCase(_tiny(), parallel, device) for parallel in (DDP, ZERO2))
        return
    depth = QUICK_LAYERS if quick else GPT_LAYERS
    for batch, length in TOKENS[: 1 if quick else None]:
        for parallel in (DDP, ZERO2) if quick else (DDP, ZERO2, ZERO3, TENSOR):
            yield RankCase(_gpt(depth, batch, length), parallel, device)
    if quick:
        return
    yield RankCase(_decode(), TENSOR, device)
    # Thunder 0.2.6 has no tensor parallelism for Llama's MLP, which multiplies two layers that are split by columns.
    yield from (RankCase(_llama(), each, device) for each in (DDP, ZERO2, ZERO3))
    yield from (RankCase(resnet_training(), each, device) for each in (DDP, ZERO2, ZERO3))


def _gpt(layers: int, batch: int, length: int) -> BenchmarkCase:
    return BenchmarkCase(
        f"GPT, {layers} layers, width 768, training {batch} x {length} tokens",
        lambda: Gpt(layers, 768, 12, 50304, max(512, length)),
        lambda: tokens_and_targets(50304, batch, length),
        trains=True,
    )


def _decode() -> BenchmarkCase:
    return BenchmarkCase(
        f"GPT decode, {GPT_LAYERS} layers, width 768, a token with a KV cache of 512",
        lambda: GptDecode(GPT_LAYERS, 768, 12, 50304, 512),
        lambda: (numbers(50304, 1), torch.tensor([256])),
    )


def _llama() -> BenchmarkCase:
    return BenchmarkCase(
        f"Llama, {LLAMA_LAYERS} layers, width 2048, training 1 x 512 tokens",  # 1.1 billion parameters
        lambda: Llama(LLAMA_LAYERS, 2048, 32, 8, 8192, 32000, 512),
        lambda: tokens_and_targets(32000, 1, 512),
        trains=True,
    )


def _tiny() -> BenchmarkCase:
    case = replace(_gpt(1, 2, 16), name="GPT, 1 layers, width 32, training 2 x 16 tokens")
    model, inputs = lambda: Gpt(1, 32, 2, 64, 32), lambda: tokens_and_targets(64, 2, 16)
    return replace(case, model=model, inputs=inputs, dtype=torch.float32)
