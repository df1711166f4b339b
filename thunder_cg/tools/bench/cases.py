"""The cases: models with their inputs, in sizes for a GPU and for a CPU. And the scaling series."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from thunder_cg.tools.bench.models import (
    Bert,
    Dlrm,
    Gpt,
    GptDecode,
    Llama,
    MaskRcnn,
    Mlp,
    MlpWithItem,
    ResNet,
    SharedLayer,
    SumOfInputs,
    SumOfParameters,
)

Inputs = Callable[[], tuple[Tensor, ...]]

MLP = "MLP, 16 layers, width 64, batch 8"
SMALL_GPT = "GPT, width 128, 1 x 16 tokens"
GPT_TRAINING = "GPT, width 768, training 2 x 128 tokens"


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """A model and its inputs.

    Attributes:
        inputs: made on the CPU from a fixed seed; those of floating point get the case's `dtype`.
        trains: a call is a forward and a backward, else a forward without gradients.
        dynamo: the Thunder variants go through `thunderfx`, because `thunder.jit` cannot trace the model.
        exact: results are compared with a float64 copy. Else they are compared with the eager model: where a copy is
            too large, or where rounding changes decisions that depend on data.
        later_calls: calls after the first ones, before anything is timed, where sizes differ from call to call.
        steps: a call that trains also clips the gradients and updates the parameters, with a fused AdamW.
        unit, size: of a scaling series; "" and 0 of other cases.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Inputs
    trains: bool = False
    dtype: torch.dtype = torch.bfloat16
    dynamo: bool = False
    exact: bool = True
    later_calls: int = 0
    steps: bool = False
    unit: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class ScalingSeries:
    """A model in several sizes: shows how host time grows with the number of `unit`s."""

    unit: str
    case: Callable[[int], BenchmarkCase] = field(repr=False)
    sizes: tuple[int, ...]
    small: tuple[int, ...]  # for a CPU, and for --quick

    @property
    def name(self) -> str:
        return f"scaling with {self.unit}s"

    def cases(self, *, small: bool) -> list[BenchmarkCase]:
        sizes = self.small if small else self.sizes
        return [replace(self.case(size), unit=self.unit, size=size) for size in sizes]


def cases(device: torch.device, quick: bool) -> tuple[BenchmarkCase, ...]:
    """The cases for a GPU, or small cases for a CPU; with `quick`, the quickest of the small ones."""
    if quick:
        return tuple(case for case in _small() if case.name in QUICK)
    found = _large() if device.type == "cuda" else _small()
    return (*found, *(_whole_step(case) for case in found if case.trains and not case.dynamo))


QUICK = ("MLP, 4 layers", "MLP with .item(), 4 layers", "DLRM, training")


def resnet_training() -> BenchmarkCase:
    return BenchmarkCase(
        "ResNet-50, training 32 images",
        lambda: ResNet("resnet50", 1000),
        lambda: (floats(32, 3, 224, 224), numbers(1000, 32)),
        trains=True,
    )


_in_float32 = partial(BenchmarkCase, dtype=torch.float32)


_GPT = (12, 768, 12, 50304, 512)
_LLAMA = (16, 2048, 32, 8, 8192, 32000, 512)


def _large() -> tuple[BenchmarkCase, ...]:
    return (*_large_forwards(), *_large_trainings())


def _large_forwards() -> tuple[BenchmarkCase, ...]:
    return (
        _in_float32(MLP, lambda: Mlp(16, 64), lambda: (floats(8, 64),)),
        BenchmarkCase(SMALL_GPT, lambda: Gpt(12, 128, 4, 512, 128), lambda: (numbers(512, 1, 16),)),
        *(
            BenchmarkCase(
                f"GPT, width 768, {rows} x {length} tokens", lambda: Gpt(*_GPT), partial(_tokens, rows, length)
            )
            for rows, length in ((1, 64), (2, 128), (16, 512))
        ),
        BenchmarkCase(
            "GPT decode, width 768, a token with a KV cache of 512",
            lambda: GptDecode(*_GPT),
            lambda: _token(50304, 256),
        ),
        _in_float32(
            "MLP with .item(), 16 layers, width 64, batch 8", lambda: MlpWithItem(16, 64), lambda: (floats(8, 64),)
        ),
        BenchmarkCase("ResNet-50, 1 image", lambda: ResNet("resnet50", 1000).eval(), lambda: (floats(1, 3, 224, 224),)),
        BenchmarkCase(
            "ResNet-50, 32 images", lambda: ResNet("resnet50", 1000).eval(), lambda: (floats(32, 3, 224, 224),)
        ),
        BenchmarkCase(
            "Llama, 1.1 billion parameters, 1 x 512 tokens",
            lambda: Llama(*_LLAMA),
            lambda: (numbers(32000, 1, 512),),
            exact=False,
        ),
    )


def _large_trainings() -> tuple[BenchmarkCase, ...]:
    return (
        BenchmarkCase(GPT_TRAINING, lambda: Gpt(*_GPT), lambda: tokens_and_targets(50304, 2, 128), trains=True),
        BenchmarkCase(
            "GPT, width 768, training 16 x 512 tokens",
            lambda: Gpt(*_GPT),
            lambda: tokens_and_targets(50304, 16, 512),
            trains=True,
        ),
        resnet_training(),
        BenchmarkCase(
            "BERT-base, training 8 x 128 tokens",
            lambda: Bert(),
            lambda: (*tokens_and_targets(30522, 8, 128), numbers(2, 8)),
            trains=True,
            dynamo=True,
        ),
        BenchmarkCase(
            "Mask R-CNN, training 2 images",
            lambda: MaskRcnn("resnet50", 91, min_size=512, max_size=512),
            lambda: _objects(2, 512),
            trains=True,
            dtype=torch.float32,
            dynamo=True,
            exact=False,
            later_calls=400,
        ),
        BenchmarkCase(
            "DLRM, training 2048 clicks",
            lambda: Dlrm(26, 10_000, 64, (512, 256), (512, 256)),
            lambda: _clicks(2048, 26, 10_000),
            trains=True,
            dtype=torch.float32,
        ),
        BenchmarkCase(
            "Llama, 1.1 billion parameters, training 1 x 512 tokens",
            lambda: Llama(*_LLAMA),
            lambda: tokens_and_targets(32000, 1, 512),
            trains=True,
            exact=False,
        ),
        BenchmarkCase(
            "Llama, 1.1 billion parameters, training 1 x 512 tokens with activation checkpointing",
            lambda: Llama(*_LLAMA, recomputes=True),
            lambda: tokens_and_targets(32000, 1, 512),
            trains=True,
            exact=False,
        ),
    )


def _whole_step(case: BenchmarkCase) -> BenchmarkCase:
    """The case with clipping and an optimizer."""
    return replace(case, name=case.name.replace("training", "whole step"), steps=True)


def _small() -> tuple[BenchmarkCase, ...]:
    small = (
        BenchmarkCase("MLP, 4 layers", lambda: Mlp(4, 32), lambda: (floats(8, 32),)),
        BenchmarkCase("MLP with .item(), 4 layers", lambda: MlpWithItem(4, 32), lambda: (floats(8, 32),)),
        BenchmarkCase("GPT, 2 layers", lambda: Gpt(2, 32, 2, 64, 32), lambda: (numbers(64, 1, 16),)),
        BenchmarkCase("GPT decode, 2 layers", lambda: GptDecode(2, 32, 2, 64, 32), lambda: _token(64, 16)),
        BenchmarkCase(
            "GPT, 2 layers, training", lambda: Gpt(2, 32, 2, 64, 32), lambda: tokens_and_targets(64, 2, 16), trains=True
        ),
        BenchmarkCase("ResNet-18, 1 image", lambda: ResNet("resnet18", 10).eval(), lambda: (floats(1, 3, 32, 32),)),
        BenchmarkCase(
            "BERT, 2 layers, training",
            lambda: Bert(
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                max_position_embeddings=32,
            ),
            lambda: (*tokens_and_targets(64, 2, 16), numbers(2, 2)),
            trains=True,
            dynamo=True,
        ),
        BenchmarkCase(
            "Mask R-CNN, training 2 small images",
            lambda: MaskRcnn(
                "resnet18",
                5,
                min_size=64,
                max_size=64,
                rpn_pre_nms_top_n_train=50,
                rpn_post_nms_top_n_train=20,
                box_batch_size_per_image=16,
            ),
            lambda: _objects(2, 64),
            trains=True,
            dynamo=True,
            exact=False,
        ),
        BenchmarkCase("DLRM, training", lambda: Dlrm(4, 50, 8, (16,), (16,)), lambda: _clicks(16, 4, 50), trains=True),
        BenchmarkCase(
            "Llama, 2 layers, training",
            lambda: Llama(2, 32, 4, 2, 64, 64, 16),
            lambda: tokens_and_targets(64, 1, 16),
            trains=True,
        ),
        BenchmarkCase(
            "Llama, 2 layers, training with activation checkpointing",
            lambda: Llama(2, 32, 4, 2, 64, 64, 16, recomputes=True),
            lambda: tokens_and_targets(64, 1, 16),
            trains=True,
        ),
    )
    return tuple(replace(case, dtype=torch.float32) for case in small)


SCALING = (
    ScalingSeries(
        "layer",
        lambda n: _in_float32(f"{n} layers", lambda: SharedLayer(n, 64), lambda: (floats(8, 64),)),
        sizes=(1, 2, 5, 10, 50, 100, 200, 500),
        small=(1, 5),
    ),
    ScalingSeries(
        "parameter",
        lambda n: _in_float32(f"{n} parameters", lambda: SumOfParameters(n, 64), lambda: (floats(64),)),
        sizes=(2, 10, 32, 100, 200, 500),
        small=(2, 10),
    ),
    ScalingSeries(
        "input",
        lambda n: _in_float32(f"{n} inputs", lambda: SumOfInputs(64), lambda: tuple(floats(64) for _ in range(n))),
        sizes=(1, 2, 5, 10, 20, 50, 100),
        small=(1, 5),
    ),
)


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def numbers(below: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def tokens_and_targets(vocabulary: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    return numbers(vocabulary, rows, length), numbers(vocabulary, rows, length, seed=1)


def _tokens(rows: int, length: int) -> tuple[Tensor]:
    return (numbers(50304, rows, length),)


def _token(vocabulary: int, position: int) -> tuple[Tensor, Tensor]:
    return numbers(vocabulary, 1), torch.tensor([position])


def _clicks(batch: int, tables: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return floats(batch, 13), numbers(rows, batch, tables), numbers(2, batch, seed=1).float()


def _objects(images: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images of noise with two objects each, which fill a quarter and four ninths of them."""
    boxes = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.3, 0.3, 0.97, 0.97]]).mul(size).expand(images, 2, 4).contiguous()
    masks = torch.zeros(images, 2, size, size, dtype=torch.uint8)
    masks[:, 0, : size // 2, : size // 2] = 1
    masks[:, 1, size // 3 :, size // 3 :] = 1
    return floats(images, 3, size, size), boxes, torch.tensor([1, 2]).expand(images, 2).contiguous(), masks
