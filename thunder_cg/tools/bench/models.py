"""The models of the benchmark in plain PyTorch. A model for training returns its loss, a 0-dim tensor.

Dropout is 0 in all models, so that the results of all variants can be compared.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thunder_cg.tools.demo import CharacterGPT, Decoder, DemoSettings


def optional(package: str) -> Any:
    """The module called `package`. ModuleNotFoundError, with what to install, if it is not there."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        name = package.partition(".")[0]
        raise ModuleNotFoundError(f"{name} is not installed; pip install {name}, or 'thunder-cg[bench]'") from error


# ------------------------------------------------------------------------------------------------- small and host-bound


class Mlp(nn.Module):
    """Residual layers with a GELU."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


class MlpWithItem(nn.Module):
    """Two MLPs, and between them `.item()`, which no graph can hold."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.before = Mlp(layers // 2, width)
        self.after = Mlp(layers // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        largest = x.abs().amax().item()
        return self.after(x / largest)


class SharedLayer(nn.Module):
    """Applies one layer `times` times: the depth grows, and the number of parameters does not."""

    def __init__(self, times: int, width: int) -> None:
        super().__init__()
        self.times = times
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = F.gelu(self.layer(x))
        return x


class SumOfParameters(nn.Module):
    """Adds `count` small parameters to its input."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.terms = nn.ParameterList(torch.randn(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for term in self.terms:
            x = x + term
        return x


class SumOfInputs(nn.Module):
    """Adds all its inputs and one parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.term = nn.Parameter(torch.randn(width))

    def forward(self, *inputs: Tensor) -> Tensor:
        x: Tensor = self.term
        for term in inputs:
            x = x + term
        return x


# ------------------------------------------------------------------------------------------------------ language models


class Gpt(CharacterGPT):
    """Logits for tokens, both (batch, length, ...); the loss if targets are given."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__(_sizes(layers, width, heads, context), vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.logits(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        return logits if targets is None else loss_of(logits, targets)


class GptDecode(Decoder):
    """Logits after one token, (1, 1, vocabulary); keys and values of the whole context are cached in place.

    `token` and `position` are int64, (1,): the position is a tensor, so that one graph serves all of them.
    """

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__(Gpt(layers, width, heads, vocabulary, context), _sizes(layers, width, heads, context))

    def forward(self, token: Tensor, position: Tensor) -> Tensor:  # type: ignore[override]
        return self.logits(token, position)


def _sizes(layers: int, width: int, heads: int, context: int) -> DemoSettings:
    return DemoSettings(torch.device("cpu"), layers, width, heads, context, batch=1, steps=0, dropout=0.0)


class RmsNorm(nn.Module):
    """Scales each row to a root mean square of 1, in float32 or wider."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = _wide(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return normed.to(x.dtype) * self.weight


class LlamaBlock(nn.Module):
    """Attention with rotated and grouped heads (RoPE, GQA), and a gated MLP (SwiGLU)."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.before_attention = RmsNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.before_mlp = RmsNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.before_attention(x)
        query = rotated(self.query(normed).view(batch, length, self.heads, self.size).transpose(1, 2), cos, sin)
        key = rotated(self.key(normed).view(batch, length, self.groups, self.size).transpose(1, 2), cos, sin)
        value = self.value(normed).view(batch, length, self.groups, self.size).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, self._shared(key), self._shared(value), is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        normed = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def _shared(self, x: Tensor) -> Tensor:
        """(batch, groups, length, size) to (batch, heads, length, size): several heads share a group."""
        batch, groups, length, size = x.shape
        shape = (batch, groups, self.heads // groups, length, size)
        return x.unsqueeze(2).expand(shape).reshape(batch, self.heads, length, size)


class Llama(nn.Module):
    """The loss for tokens and targets, both int64, (batch, length); without targets, the logits.

    Args:
        recomputes: the backward computes each block again (activation checkpointing).
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        groups: int,
        hidden: int,
        vocabulary: int,
        length: int,
        *,
        recomputes: bool = False,
    ) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups, hidden) for _ in range(layers))
        self.norm = RmsNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            if self.recomputes:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return logits if targets is None else loss_of(logits, targets)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: pairs of halves turned by an angle that grows with the position; the last two sizes are those of `cos`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, in float32 or wider."""
    return F.cross_entropy(_wide(logits).flatten(0, 1), targets.flatten())


def _wide(x: Tensor) -> Tensor:
    """The tensor in float32 or wider."""
    return x if x.dtype == torch.float64 else x.float()


# ------------------------------------------------------------------------------------------------------- recommendation


class Dlrm(nn.Module):
    """DLRM: the loss of a click prediction from dense features and one index into each table.

    `dense` is (batch, 13), `sparse` int64 (batch, tables), `clicked` (batch,) of 0 and 1. The products of all pairs of
    vectors, those of the tables and the one of the dense features, go into the top MLP.
    """

    pairs: Tensor

    def __init__(self, tables: int, rows: int, width: int, bottom: tuple[int, ...], top: tuple[int, ...]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = _perceptron((13, *bottom, width))
        vectors = tables + 1
        below = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", below[0] * vectors + below[1])
        self.top = _perceptron((width + len(self.pairs), *top, 1))

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        dense = self.bottom(dense)
        vectors = torch.stack([dense, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits = self.top(torch.cat((dense, products), dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicked)


def _perceptron(sizes: tuple[int, ...]) -> nn.Sequential:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


# -------------------------------------------------------------------------------------------------- from other packages


class Bert(nn.Module):
    """BERT's pre-training loss, with random weights; `settings` are those of `transformers.BertConfig`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        transformers = optional("transformers")
        config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings)
        self.model = transformers.BertForPreTraining(config)

    def forward(self, tokens: Tensor, labels: Tensor, follows: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=labels, next_sentence_label=follows).loss
        return loss


class ResNet(nn.Module):
    """A ResNet of torchvision with random weights: logits for images, the loss if labels are given."""

    def __init__(self, name: str, classes: int) -> None:
        super().__init__()
        self.model = getattr(optional("torchvision.models"), name)(weights=None, num_classes=classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.model(images)
        return logits if labels is None else F.cross_entropy(_wide(logits), labels)


class MaskRcnn(nn.Module):
    """Mask R-CNN's training loss, with random weights, on a ResNet of torchvision; `settings` are those of `MaskRCNN`.

    `images` (batch, 3, height, width), `boxes` (batch, objects, 4), `labels` int64 (batch, objects), `masks` uint8
    (batch, objects, height, width). The loss uses proposals that depend on data and are drawn at random.
    """

    def __init__(self, backbone: str, classes: int, **settings: Any) -> None:
        super().__init__()
        detection = optional("torchvision.models.detection")
        features = detection.backbone_utils.resnet_fpn_backbone(
            backbone_name=backbone, weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
        )
        self.model = detection.MaskRCNN(features, classes, **settings)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor, masks: Tensor) -> Tensor:
        objects = [{"boxes": b, "labels": n, "masks": m} for b, n, m in zip(boxes, labels, masks)]
        losses = self.model([*images], objects)
        return torch.stack([*losses.values()]).sum()

    def hide_from_dynamo(self) -> None:
        """Keeps eager what fails in thunderfx of Thunder 0.2.6: it pads images into slices of a batch, and it makes
        anchors and box codes with `torch.as_tensor`, which Thunder wrongly counts as supported."""
        parts = ((self.model.transform, "forward"), (self.model.rpn.anchor_generator, "forward"))
        coders = ((part.box_coder, "encode_single") for part in (self.model.rpn, self.model.roi_heads))
        for part, method in (*parts, *coders):
            setattr(part, method, torch.compiler.disable(getattr(part, method)))
