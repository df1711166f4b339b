"""Small models that the tests share. Thunder takes seconds to compile a layer, so there are as few as can be."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def _direct(kind: type[nn.Module]) -> type[nn.Module]:
    """A module that is called without PyTorch's hooks: Thunder traces through those, which takes most of its time."""
    return type(kind.__name__, (kind,), {"__call__": kind.forward})


Linear, Embedding, Conv2d = map(_direct, (nn.Linear, nn.Embedding, nn.Conv2d))
LayerNorm, BatchNorm2d = map(_direct, (nn.LayerNorm, nn.BatchNorm2d))
Dropout, GELU, ReLU, MaxPool2d = map(_direct, (nn.Dropout, nn.GELU, nn.ReLU, nn.MaxPool2d))


def mlp(layers: int = 2, width: int = 16) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(layers) for m in (Linear(width, width), GELU())))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = LayerNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)
        self.norm2 = LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)
        self.drop = Dropout(dropout)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(batch, time, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    __call__ = forward


class GPT(nn.Module):
    """Logits ``(batch, time, vocab)`` for tokens ``(batch, time)``; the loss if targets are given."""

    def __init__(self, layers=1, width=32, heads=4, vocab=64, block=32, dropout=0.0) -> None:
        super().__init__()
        self.tokens = Embedding(vocab, width)
        self.positions = Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = LayerNorm(width)
        self.head = Linear(width, vocab, bias=False)

    def forward(self, tokens, targets=None):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = BatchNorm2d(out)
        self.conv2 = Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = BatchNorm2d(out)
        self.down = None
        if stride != 1 or channels != out:
            self.down = nn.Sequential(Conv2d(channels, out, 1, stride, bias=False), BatchNorm2d(out))

    def forward(self, x):
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.down is None else self.down(x)))

    __call__ = forward


class ResNet(nn.Module):
    """Logits ``(batch, 10)`` for images ``(batch, 3, height, width)``."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(Conv2d(3, width, 3, 1, 1, bias=False), BatchNorm2d(width), ReLU())
        self.pool = MaxPool2d(3, 2, 1)
        self.body = Residual(width, 2 * width, 2)
        self.head = Linear(2 * width, 10)

    def forward(self, x):
        x = self.body(self.pool(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class CachedAttention(nn.Module):
    """One head of attention that keeps keys and values of up to ``length`` steps in its buffers."""

    def __init__(self, width: int = 16, length: int = 8) -> None:
        super().__init__()
        self.qkv = Linear(width, 3 * width)
        self.register_buffer("keys", torch.zeros(1, length, width))
        self.register_buffer("values", torch.zeros(1, length, width))
        self.register_buffer("steps", torch.arange(length))

    def forward(self, x, position):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        self.keys.index_copy_(1, position, k)
        self.values.index_copy_(1, position, v)
        scores = q @ self.keys.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = torch.where(self.steps <= position, scores, float("-inf"))
        return torch.softmax(scores, dim=-1) @ self.values


class Precomputed(torch.autograd.Function):
    """Its gradient is what the forward has left, as in fused losses."""

    @staticmethod
    def forward(ctx, x, y):
        z = torch.tanh(x) * 2
        ctx.save_for_backward(z)
        return z.sum() + y

    @staticmethod
    def backward(ctx, g):
        (saved,) = ctx.saved_tensors
        return saved, g
