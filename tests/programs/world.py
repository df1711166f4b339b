"""What a random training step finds around it. Each run imports a copy of this file with a step at its end."""

import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import os  # noqa: F401
import random
import threading
import weakref

import numpy as np
import torch
from torch import nn
from torch.nn.functional import dropout


class Mode(enum.Enum):
    A = 1
    B = 2


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    mode: Mode = Mode.A


class State:
    limit = 100

    def __init__(self):
        self.calls, self.scale, self.last = 0, 1.0, None
        self.weight, self.buffer, self.mean = torch.ones(3), torch.zeros(4), torch.zeros(())
        self.queue = collections.deque(maxlen=3)
        self.table = {"a": [1.0], "b": {"c": 2.0}}
        self.config = Config()
        self.history = []
        self.before, self.now = torch.zeros(()), torch.zeros(())

    def count(self):
        self.calls += 1

    @property
    def doubled(self):
        return self.scale * 2


class Slots:
    __slots__ = ("calls", "scale")

    def __init__(self):
        self.calls, self.scale = 0, 1.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.rate, self.seen, self.act = 0.0, 0, torch.tanh
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = self.norm(self.first(x))
        x = dropout(x, self.rate, self.training) if self.rate else x
        return self.second(self.act(x))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        counts["backward"] = counts.get("backward", 0) + flags["counts"]
        return gradient * 2


def variables():
    n, rate = 0, 1.0

    def count():
        nonlocal n
        n += 1

    def get_rate():
        return rate

    def set_rate(value):
        nonlocal rate
        rate = value

    return count, get_rate, set_rate


def scaled(x):
    return x * SCALE * scaled.k


@functools.lru_cache
def cached():
    return SCALE


def generated(values=(0.5, 0.25)):
    yield from values


torch.manual_seed(0)
SCALE, scaled.k = 1.0, 1.0
model = Model()
teacher = copy.deepcopy(model)
state = State()
config = {"scale": 1.0, "count": 0, "deep": {"list": [1.0, 2.0]}}
flags, counts, history = {"counts": 0}, {}, []
array, metrics = np.ones(3), {"loss": torch.zeros(())}
rng, generator = random.Random(5), torch.Generator().manual_seed(7)
count, get_rate, set_rate = variables()
functions = {"scaled": scaled, "count": count}
slots, local, context = Slots(), threading.local(), contextvars.ContextVar("context", default=1.0)
local.scale = 1.0
model_of, named, of_mode = weakref.ref(model), [scaled, count], {Mode.A: 1.0, Mode.B: 0.5}
half = functools.partial(torch.mul, other=0.5)
