"""What a step depends on from far away: each change is seen before a replay, or the step is not captured."""

from __future__ import annotations

import array
import builtins
import cmath
import copy
import cProfile
import ctypes
import gc
import hashlib
import inspect
import itertools
import linecache
import logging
import math
import mmap
import multiprocessing
import os
import pickle
import queue
import random
import re
import secrets
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
import time
import types
import uuid
import warnings
import weakref
from abc import ABC
from collections import Counter, OrderedDict, UserList, UserString, defaultdict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from contextvars import ContextVar, copy_context
from datetime import datetime, timedelta
from decimal import Context, Decimal, setcontext
from enum import Enum
from fractions import Fraction
from functools import cached_property, lru_cache, partial, partialmethod, singledispatch, update_wrapper, wraps
from importlib import import_module
from operator import attrgetter, itemgetter
from types import CellType, FunctionType, MappingProxyType, SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support import on_threads
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, dropout
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from thunder_cg import explain, graphed_step
from thunder_cg.compat.autograd import hooks_of
from thunder_cg.errors import CaptureRefused
from thunder_cg.step import recording, storages
from thunder_cg.step.calls import Calls
from thunder_cg.step.outside import random_states
from thunder_cg.step.state import StepState

SCALE = 1.0
pytestmark = pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")


def make_step(of, optimizer=SGD):
    """Makes steps whose loss ``of`` computes from what the model returns."""

    def make(model):
        made = optimizer(model.parameters(), lr=0.1)

        def step(x, y):
            made.zero_grad()
            loss = of(model(x)).square().mean()
            loss.backward()
            made.step()
            return loss

        step.optimizer = made
        return step

    return make


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 1.0

    def forward(self, y):
        return y * self.k * SCALE


class Head(nn.Module):
    """Has a module that is in no dictionary of modules."""

    def __init__(self):
        super().__init__()
        self.others = [Scaled()]

    def forward(self, y):
        return self.others[0](y)


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's and Lightning's are: what it does is installed code that reads the wrapped one."""

    def __init__(self, parameters, lr):
        self.optimizer = SGD(parameters, lr)

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    zero_grad = torch.no_grad()(lambda self: self.optimizer.zero_grad())
    step = torch.no_grad()(lambda self: self.optimizer.step())


def changing(step_twins, of, change, calls=9, **options):
    """Trains with a change after five calls, which has to be seen."""

    def between(i, model, fn, batch):
        if i == 4:
            change(model, fn)
        elif i == calls - 1:
            change(model, fn, back=True)

    return step_twins.train(make_step(of, **options), calls, between)


def set_scale(*_, back=False):
    global SCALE
    SCALE = 1.0 if back else 3.0


def test_a_global_of_a_modules_code(step_twins):
    head = nn.Sequential(Scaled())
    step = changing(step_twins, lambda y: head(y), set_scale)
    assert step.captures == 2, explain(step)


def plain(y):
    return y * SCALE


def decorated(*decorators):
    def scaled(y):
        return y * SCALE

    for decorator in decorators:
        scaled = decorator(scaled)
    return scaled


def wrapping(fn):
    """A decorator of the user's, which does not say what it wraps."""

    def wrapped(y):
        return fn(y)

    return wrapped


class Base:
    alpha = 1.0

    def __init__(self):
        self.beta = 1.0

    def __call__(self, y):
        return y * SCALE * self.alpha * self.beta

    def __matmul__(self, y):
        return y * SCALE

    @property
    def scale(self):
        return SCALE


class Derived(Base):
    def __call__(self, y):
        return super().__call__(y)


class Made:
    """An object that the step makes."""

    def __init__(self, y):
        self.y = y * SCALE


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * SCALE


base, derived, functions = Base(), Derived(), {"f": plain}
FUNCTIONS = {
    "a dictionary": lambda y: functions["f"](y),
    "map": lambda y: next(iter(map(plain, [y]))),
    "getattr": lambda y: getattr(base, "".join(["sca", "le"])) * y,
    "autocast": decorated(torch.autocast("cpu", enabled=False)),
    "a decorator": decorated(wrapping, wrapping),
    "compiled": torch.compile(decorated(), backend="eager"),
    "a base class": lambda y: derived(y),
    "an operator": lambda y: base @ y,
    "a property": lambda y: y * base.scale,
    "an object": lambda y: Made(y).y,
    "a backward": lambda y: Reversed.apply(y),
}


IN_CI = {"compiled", "a base class", "a property"}


@pytest.mark.parametrize("kind", [k if k in IN_CI else pytest.param(k, marks=pytest.mark.nightly) for k in FUNCTIONS])
def test_functions_that_are_called_indirectly(step_twins, kind):
    step = changing(step_twins, FUNCTIONS[kind], set_scale, calls=11)
    # Dynamo compiles a number that has changed as a tensor on the host, which no graph can read.
    is_read = kind == "compiled" and step_twins.device == "cpu"
    assert step.captures == (1 if is_read else 2) and step.replays >= 3, explain(step)


def test_a_function_that_counts_in_a_variable_it_closes_over(step_twins):
    """What it closes over is another value by the time that it is looked for."""

    def run(graphed):
        calls = 0

        def count(y):
            nonlocal calls
            calls += 1
            return y * calls

        functions = {"f": count}
        step = graphed(lambda y: functions["f"](y))
        return [step(torch.ones(2, device=step_twins.device)) for _ in range(6)], step

    assert step_twins.both(run).replays == 0


class Keeping:
    """A decorator that keeps results, as an object."""

    def __init__(self, fn, kept):
        update_wrapper(self, fn)
        self.fn, self.kept = fn, kept

    def __call__(self, y):
        self.kept.append(result := self.fn(y))
        return result.clone()


def keeping(fn, kept):
    @wraps(fn)
    def call(y):
        kept.append(result := fn(y))
        return result.clone()

    return call


@pytest.mark.parametrize("decorator", [keeping, Keeping])
def test_what_a_decorator_keeps(step_twins, decorator):
    def run(graphed):
        keeps = decorator(lambda y: y * 2, kept := [])
        made = graphed(lambda y: keeps(y))
        return [*(made(torch.ones(2, device=step_twins.device)) for _ in range(6)), *kept], made

    step = step_twins.both(run)
    assert step.replays == 4, explain(step)


def test_what_a_compiled_module_and_function_read(step_twins):
    head, function = step_twins.compiled(Scaled()), step_twins.compiled(decorated())
    step = changing(step_twins, lambda y: function(head(y)), set_scale, calls=11)
    assert step.captures == 2, explain(step)


def test_attributes_of_what_a_method_is_bound_to(step_twins):
    made = Derived()

    def change(*_, back=False):
        made.beta = 1.0 if back else 2.0

    assert changing(step_twins, lambda y: {"f": made}["f"](y), change, calls=11).captures == 2


manual_seed = torch.compiler.disable(torch.random.manual_seed)  # as Dynamo has it, where tests/speed.py does not


@pytest.mark.parametrize("how", ["manual_seed", "fork_rng", "checkpoint"])
@pytest.mark.nightly_after(2)
def test_a_step_that_sets_the_random_state(step_twins, how):
    def of(y):
        if how == "manual_seed":
            manual_seed(3)
        if how == "checkpoint":
            return checkpoint(lambda y: dropout(y, 0.5), y, use_reentrant=False)
        with torch.random.fork_rng(enabled=how == "fork_rng"):
            return dropout(y, 0.5)

    step = step_twins.train(make_step(of))
    assert step.captures == 0
    if step_twins.device == "cpu":
        said = "reads or sets the state of a generator of random numbers, at test_step_reads.py:"
        assert said in str([*step.in_python])


@pytest.mark.parametrize("read", [lambda: torch.get_rng_state()[0], torch.initial_seed])
def test_a_step_that_reads_the_random_state(step_twins, read):
    step = step_twins.graphed(make_step(lambda y: y * read())(step_twins.model()))
    for _ in range(5):
        step(*step_twins.batch())
    assert step.captures == 0
    assert "reads or sets the state of a generator of random numbers, at test_step_reads.py:" in str([*step.in_python])


class Weighed:
    """Has a method by `partialmethod`, which each lookup makes anew."""

    scale = 1.0

    def weigh(self, by, y):
        return y * by * self.scale

    twice = partialmethod(weigh, 2.0)


def test_a_partial_method(step_twins):
    weighed = Weighed()

    def change(*_, back=False):
        weighed.scale = 1.0 if back else 2.0

    step = changing(step_twins, lambda y: weighed.twice(y), change)
    assert step.captures == 2 and step.replays >= 4, explain(step)


def test_a_step_with_bound_arguments(step_twins):
    """Somebody may bind more of them later."""

    def make(model):
        def step(optimizer, x, y, scale=1.0):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y) * scale
            loss.backward()
            optimizer.step()
            return loss

        return partial(step, SGD(model.parameters(), lr=0.1))

    def between(i, model, fn, batch):
        if i in (4, 7):
            fn.keywords["scale"] = i / 2

    step = step_twins.train(make, 12, between)
    assert step.captures == 3 and "len(step.keywords) changed from 0 to 1" in str([*step.in_python]), explain(step)


def test_a_class_that_is_registered(step_twins):
    class Known(ABC):  # noqa: B024
        pass

    class Other:
        pass

    def run(graphed):
        known, other = type("Known", (Known,), {}), type("Other", (Other,), {})()
        step = graphed(make_step(lambda y: y * (2.0 if isinstance(other, known) else 1.0))(step_twins.model()))
        found = [step(*step_twins.batch()).detach() for _ in range(5)]
        known.register(type(other))
        return [*found, *(step(*step_twins.batch()).detach() for _ in range(4))], step

    step = step_twins.both(run)
    assert step.captures == 2, explain(step)


LOGGER = logging.getLogger("a step")
OF_THE_PROCESS = {
    "how NumPy prints": (lambda: np.get_printoptions()["precision"], lambda n: np.set_printoptions(precision=n), 3),
    "the collector": (gc.isenabled, lambda is_on: gc.enable() if is_on else gc.disable(), False),
    "a thread": (
        lambda: threading.current_thread().name,
        lambda name: setattr(threading.current_thread(), "name", name),
        "other",
    ),
    "a level": (lambda: LOGGER.getEffectiveLevel(), logging.getLogger().setLevel, logging.ERROR),
    "whether a logger logs": (
        lambda: LOGGER.isEnabledFor(logging.ERROR),
        lambda is_on: logging.disable(logging.NOTSET if is_on else logging.CRITICAL),
        False,
    ),
    "a limit": (
        lambda: inspect.signature(make_step) and sys.getrecursionlimit(),
        sys.setrecursionlimit,
        sys.getrecursionlimit() + 1,
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
}


@pytest.mark.parametrize("kind", OF_THE_PROCESS)
@pytest.mark.nightly_after(2)
def test_what_the_process_tells_is_compared(step_twins, kind):
    """Accelerate's optimizers ask for a signature in each step, which asks for a limit."""
    get, put, other = OF_THE_PROCESS[kind]
    before = get()

    def change(*_, back=False):
        put(before if back else other)

    def weigh(y):
        return y * (1.0 if get() == before else 2.0)

    assert changing(step_twins, weigh, change).captures == 2


def test_all_of_numpys_random_state():
    """However NumPy prints an array."""
    kept, key = np.random.get_state(), np.arange(624)
    try:
        with np.printoptions(threshold=10):
            states = []
            for key[300] in (0, 1):
                np.random.set_state(("MT19937", key, 0))
                states.append(random_states(torch.device("cpu")))
    finally:
        np.random.set_state(kept)
    assert states[0] != states[1]


def test_a_profiler_of_python(step_twins):
    step = step_twins.graphed(make_step(lambda y: y)(step_twins.model()))
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(4):
            step(*step_twins.batch())
    if sys.version_info < (3, 12):  # later ones do not exclude each other
        assert step.captures == 0 and "begin to profile after the step has been captured" in str([*step.in_python])
    step(*step_twins.batch())
    step(*step_twins.batch())
    assert step.captures == 1 and sys.getprofile() is None


def test_a_module_in_a_list(step_twins):
    head = Head()

    def change(*_, back=False):
        head.others[0].k = 1.0 if back else 2.0

    assert changing(step_twins, lambda y: head(y), change).captures == 2


def test_a_module_that_is_the_step(step_twins):
    """No name leads to it, and what its forward reads and assigns counts all the same."""

    class Halving(Scaled):
        def forward(self, y):
            self.k = self.k / 2
            return y * self.k

    x = torch.ones(3, device=step_twins.device)
    halving = Halving()
    step = step_twins.graphed(halving)
    assert [step(x)[0].item() for _ in range(6)] == [2.0**-i for i in range(1, 7)]
    assert step.captures == 0 and "self.k changed from" in str([*step.in_python])
    step = step_twins.graphed(scaled := Scaled())
    scaled.k = 2.0
    assert [step(x)[0].item() for _ in range(4)] == [2.0 * SCALE] * 4 and step.replays == 2
    scaled.k = 3.0
    assert step(x)[0].item() == 3.0 * SCALE


def test_an_optimizer_in_another_one(step_twins):
    def change(model, fn, back=False):
        fn.optimizer.optimizer.param_groups[0]["lr"] = 0.1 if back else 0.01

    assert changing(step_twins, lambda y: y, change, optimizer=Wrapper).captures == 2


@pytest.mark.parametrize("make", [itertools.count, lambda: iter([1.0] * 99), lambda: (1.0 for _ in range(99))])
def test_iterators(step_twins, make):
    """Nobody can tell how far one has been read."""
    value = make()
    step = step_twins.graphed(make_step(lambda y: y * (1 + float(next(value))))(step_twins.model()))
    for _ in range(4):
        step(*step_twins.batch())
    said = str([*step.in_python])
    assert step.captures == 0 and "which no replay would advance (see test_step_reads.py:" in said
    assert "; take the next item outside" in said
    assert step_twins.device == "cuda" or sum(1 for _ in zip(value, range(10))) == 10


VALUES = {
    "array of NumPy": np.ones(3),
    "scalar of NumPy": np.ones(1, np.float32)[0],
    "array": array.array("d", [1.0]),
    "queue": deque([1.0]),
    "array of C": (ctypes.c_double * 2)(1.0, 1.0),
    "shared array": multiprocessing.Array("d", [1.0]),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.nightly_after(2)
def test_values_that_change_without_a_trace(step_twins, kind):
    holder = SimpleNamespace(of=VALUES[kind])

    def change(*_, back=False):
        if kind == "scalar of NumPy":
            holder.of = np.float32(1 if back else 2)
        else:
            holder.of[0] = 1.0 if back else 2.0

    def of(y):
        return y * float(holder.of if kind == "scalar of NumPy" else holder.of[0])

    assert changing(step_twins, of, change).captures == 2


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (np.random.default_rng, np.random.Generator.random),
        (np.random.RandomState, np.random.RandomState.rand),
        (random.Random, random.Random.random),
        (torch.Generator().manual_seed, lambda generator: torch.rand((), generator=generator)),
    ],
)
def test_generators_of_random_numbers(step_twins, make, draw):
    generator, twin = copy.deepcopy(make(0)), copy.deepcopy(make(0))
    step = step_twins.graphed(make_step(lambda y: y * float(draw(generator)))(step_twins.model()))
    for _ in range(12):
        step(*step_twins.batch())
        draw(twin)
    assert step.captures == 0 and "generator holds changed" in str([*step.in_python])
    assert draw(generator) == draw(twin)  # no call has drawn twice, or not at all


@pytest.mark.parametrize(
    "read",
    [
        *(time.time, time.perf_counter_ns, datetime.now, lambda: os.urandom(1)[0], time.process_time, datetime.today),
        *(lambda: time.localtime().tm_sec, lambda: int(time.strftime("%S"))),
        *(lambda: secrets.randbelow(9), lambda: secrets.token_bytes(1)[0], lambda: uuid.uuid4().int % 9),
    ],
)
def test_clocks_and_random_numbers_of_the_system(step_twins, read):
    def of(y):
        now = read()
        return y * (now.microsecond if isinstance(now, datetime) else now)

    step = step_twins.graphed(make_step(of)(step_twins.model()))
    for _ in range(5):
        step(*step_twins.batch())
    assert step.captures == 0
    said = r"\(\) returns another value in each call, at test_step_reads.py:\d+, and in no replay; call it"
    assert re.search(said, str([*step.in_python]))


def on_a_thread(y):
    found = []
    thread = threading.Thread(target=lambda: found.append(y * 2))
    thread.start()
    thread.join()
    return found[0]


POOL = ThreadPoolExecutor(1)


def in_a_pool(y):
    return POOL.submit(lambda: y * 2).result()


@pytest.mark.parametrize("of", [on_a_thread, in_a_pool])
def test_work_of_other_threads(step_twins, of):
    in_a_pool(torch.ones(1))  # the thread is there
    step = step_twins.train(make_step(of), 5)
    assert step.captures == 0 and re.search(r"thread, at test_step_reads.py:\d+,", str([*step.in_python]))


class Counting:
    """Properties that somebody would notice if they were called to compare them."""

    def __init__(self):
        self.base, self.calls = 1.0, []

    @property
    def scale(self):
        self.calls.append(None)
        return self.base

    @cached_property
    def options(self):
        self.calls.append(None)
        return SimpleNamespace(scale=1.0)


def test_properties_are_not_called_to_compare_them():
    counting = Counting()
    state = state_of(lambda y: y * counting.scale * counting.options.scale)
    assert len(counting.calls) == 2 and state.holds() and state.again().facts == state.facts
    counting.options.scale = 2.0
    assert not state.holds() and len(counting.calls) == 2
    state = state.again()
    counting.base = 2.0
    assert state.again().facts != state.facts and len(counting.calls) == 2


class Draws:
    def __get__(self, owner, kind=None):
        return torch.rand((), device=owner.device)


class Computed:
    drawn = Draws()

    def __init__(self, model):
        self.device = next(model.parameters()).device
        self.scale = 1.0

    def __getattr__(self, name):
        return torch.rand((), device=self.device) * self.scale


@pytest.mark.parametrize(
    "of",
    [
        lambda kept: lambda y: y + kept.layer.weight.square().sum(),  # each lookup improves the estimate of the norm
        lambda kept: lambda y: y + kept.computed.drawn,
        lambda kept: lambda y: y + kept.computed.other,
        lambda kept: lambda y: y + kept.normal.variance.sum(),
    ],
    ids=["spectral norm", "a descriptor", "__getattr__", "a property of PyTorch's"],
)
@pytest.mark.nightly_after(1)
def test_what_a_lookup_computes_is_computed_in_the_step_alone(step_twins, of):
    """It writes buffers and draws random numbers, so a lookup to compare it would make the step another one."""

    def make(model):
        torch.manual_seed(2)
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).to(step_twins.device)
        one = torch.ones(3, device=step_twins.device)
        kept = SimpleNamespace(layer=layer, computed=Computed(model), normal=torch.distributions.Normal(one, one))
        torch.manual_seed(1)
        return make_step(of(kept))(model)

    step = step_twins.train(make, 8)
    assert step.captures == 1 and step.replays >= 5, explain(step)


def test_what_getattr_reads_is_compared(step_twins):
    computed = []

    def multiply(by):
        return lambda y: y * by.other

    def make(model):
        computed.append(Computed(model))
        return make_step(multiply(computed[-1]))(model)

    def between(i, model, fn, batch):
        computed[-1].scale = 1.0 if i < 4 else 2.0

    step = step_twins.train(make, 10, between)
    assert step.captures == 2 and step.replays >= 4, explain(step)


class Odd(OrderedDict):
    """As registries are that load what they have only when somebody asks: it cannot be copied or looked through."""

    def __init__(self, one, other):
        super().__init__()
        self["scale"], self["other"] = one, other

    def items(self):
        raise NotImplementedError

    def get(self, name):
        return super().get(name, 1.0)


def test_a_dictionary_that_cannot_be_copied(step_twins):
    odd = Odd(1.0, 2.0)

    def change(*_, back=False):
        odd["scale"] = 1.0 if back else 3.0

    assert changing(step_twins, lambda y: y * odd["scale"] * odd.get("scale"), change).captures == 2


@pytest.mark.parametrize("is_passed_on", [False, True])
@pytest.mark.nightly_after(1)
def test_what_a_proxy_refers_to(step_twins, is_passed_on):
    kept = Settings()
    kept.scale, proxy = 1.0, weakref.proxy(kept)

    def change(*_, back=False):
        kept.scale = 1.0 if back else 3.0

    def scaled(y, by):
        return y * by.scale

    of = (lambda y: scaled(y, proxy)) if is_passed_on else (lambda y: y * proxy.scale)
    assert changing(step_twins, of, change).captures == 2


def test_a_method_that_is_stored_anew_in_each_step(step_twins):
    scaled = Scaled()

    def make(model):
        kept = SimpleNamespace(method=scaled.forward)

        def of(y):
            every = kept
            y = every.method(y)
            every.method = scaled.forward
            return y

        return make_step(of)(model)

    step = step_twins.train(make)
    assert step.captures == 1 and step.replays >= 4, explain(step)


def test_what_is_too_large_to_compare(step_twins):
    for value in ([1.0] * 10_001, np.ones(10_000)):
        step = step_twins.graphed(make_step(lambda y, value=value: y * float(value[0]))(step_twins.model()))
        for _ in range(3):
            step(*step_twins.batch())
        assert step.captures == 0 and "are compared before a replay" in str([*step.in_python])


def test_what_inductor_writes_is_not_the_users():
    """Its modules have this name (torch 2.9 to 2.11), and files anywhere. `test_a_replay_is_one_launch` runs some."""
    variables = {"__name__": "torch._inductor.runtime.compile_tasks.key", "__file__": "/tmp/key.py", "SCALE": 1.0}
    calls = Calls()
    calls.watch()
    FunctionType(plain.__code__.replace(co_filename="/tmp/key.py"), variables)(2.0)
    calls.end()
    calls.find_functions()
    assert not calls.found


def test_a_capture_that_fails_ends_its_watch(step_twins, monkeypatch):
    """Wherever it fails, the next capture may watch."""
    step = step_twins.graphed(make_step(lambda y: y)(step_twins.model()))
    for module, name in ((storages, "place"), (storages, "copy_all"), (recording, "states_outside")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda *_: 1 / 0)
            for _ in range(3):
                step(*step_twins.batch())
        assert step.captures == 0 and sys.getprofile() is None
        step._refused.clear()
    for _ in range(3):
        step(*step_twins.batch())
    assert step.captures == 1, explain(step)


@pytest.mark.nightly
def test_what_dynamo_compiles_in_a_capture(step_twins):
    """It restores all generators afterwards, as a step that sets one cannot."""
    compiled = torch.compile(lambda y: torch.sin(y) * 2, backend="eager")
    step = step_twins.train(make_step(compiled), between=lambda *_: torch.compiler.reset())
    assert step.captures == 1 and step.replays >= 3, explain(step)


# ------------------------------------------------------------------------------------ what no name of the step leads to


class Settings:
    scale = 1.0
    table: ClassVar = {"scale": 1.0}

    def weigh(self, y):
        return y


def weigh(settings, y):
    return y * settings.scale


def of_settings():
    settings = Settings()
    return lambda y: weigh(settings, y), settings


def an_attribute_of_a_class():
    step, settings = of_settings()
    return step, partial(setattr, type(settings), "scale", 2.0)


class Kind(type):
    scale = 1.0


class OfKind(metaclass=Kind):
    pass


def an_attribute_of_a_metaclass():
    return lambda y: weigh(OfKind, y), partial(setattr, Kind, "scale", 2.0)


def an_attribute_that_comes():
    settings = SimpleNamespace(inner=SimpleNamespace())

    def step(y):
        try:
            return y * settings.inner.scale
        except AttributeError:
            return y

    return step, partial(setattr, settings.inner, "scale", 2.0)


def a_global_that_comes():
    def step(y):
        try:
            return y * LATER
        except NameError:
            return y

    return step, partial(globals().__setitem__, "LATER", 2.0)


def a_variable_that_comes():
    def step(y):
        try:
            return y * later
        except NameError:
            return y

    def change():
        nonlocal later
        later = 2.0

    later = 1.0
    del later
    return step, change


def the_order_of_an_ordered_dictionary():
    scales = OrderedDict(one=1.0, two=2.0)
    return lambda y: y * next(iter(scales.values())), partial(scales.move_to_end, "one")


def a_set_of_weak_references():
    settings = [Settings(), Settings()]
    known = weakref.WeakSet(settings[:1])
    return lambda y: y * sum(each.scale for each in known), lambda: known.add(settings[1])


Pair = namedtuple("Pair", "scale loss")  # a class of the user's, with descriptors in C


class Point(ctypes.Structure):
    _fields_: ClassVar = [("scale", ctypes.c_double)]


def a_structure_of_c():
    point = Point(1.0)
    return lambda y: weigh(point, y), partial(setattr, point, "scale", 2.0)


def a_table_of_a_class():
    settings = Settings()
    return lambda y: y * type(settings).table["scale"], lambda: Settings.table.update(scale=2.0)


def a_class_that_is_passed_on():
    return lambda y: weigh(Settings, y), partial(setattr, Settings, "scale", 2.0)


def another_class():
    step, settings = of_settings()
    return step, lambda: setattr(settings, "__class__", type("Other", (Settings,), {"scale": 2.0}))


def a_method_of_a_class():
    step = Settings().weigh
    return lambda y: step(y), partial(setattr, Settings, "weigh", lambda self, y: y * 2)


def a_module_that_is_passed_on():
    settings = types.ModuleType("settings")
    settings.SCALE = 1.0
    return lambda y: y * getattr(settings, "SCALE"), partial(setattr, settings, "SCALE", 2.0)  # noqa: B009


def a_class_of_a_module_that_is_not_there():
    kind = type("Kind", (), {"scale": 1.0, "__module__": "settings"})
    return lambda y: weigh(kind, y), partial(setattr, kind, "scale", 2.0)


def an_import_in_a_function():
    def step(y):
        import test_step_reads as this

        return y * this.SCALE

    return step, set_scale


def a_name_imported_in_a_function():
    def step(y):
        from test_step_reads import SCALE, plain

        return plain(y) * SCALE

    return step, set_scale


def a_default():
    def scaled(y, *, by=[1.0]):  # noqa: B006
        return y * by[0]

    return lambda y: scaled(y), lambda: scaled.__kwdefaults__["by"].insert(0, 2.0)


def other_defaults():
    def scaled(y, by=1.0):
        return y * by

    return lambda y: [scaled][0](y), partial(setattr, scaled, "__defaults__", (2.0,))


def the_code_of_a_function():
    """As IPython's ``%autoreload`` does it."""
    scaled = decorated()
    return lambda y: scaled(y), partial(setattr, scaled, "__code__", (lambda y: y * SCALE * 2).__code__)


def an_attribute_of_a_function():
    scaled = decorated()
    scaled.scale = 1.0
    scaled.itself = scaled
    return lambda y: weigh(scaled, y), partial(setattr, scaled, "scale", 2.0)


def closures_of_one_code():
    def make(scale):
        def scaled(y):
            return y * scale

        def set_to(other):
            nonlocal scale
            scale = other

        return scaled, set_to

    (first, _), (second, set_to) = make(1.0), make(1.0)
    return lambda y: [first, second][1](first(y)), partial(set_to, 2.0)


def an_argument_of_partial():
    settings = SimpleNamespace(scale=1.0)
    functions = [partial(weigh, settings)]
    return lambda y: functions[0](y), partial(setattr, settings, "scale", 2.0)


def what_a_partial_calls():
    scaled = partial(weigh, SimpleNamespace(scale=1.0))
    calls = [scaled]
    other = scaled.func, (SimpleNamespace(scale=2.0),), {}, {}
    return lambda y: calls[0](y), partial(scaled.__setstate__, other)


def the_name_of_a_class():
    settings = type("Small", (Settings,), {"__module__": __name__})()
    return lambda y: y * len(type(settings).__qualname__), partial(setattr, type(settings), "__qualname__", "Large one")


def a_slot_of_the_library():
    scale = Fraction(1, 2)
    return lambda y: y * float(scale), partial(setattr, scale, "_numerator", 3)


def a_variable_of_the_context():
    variable = ContextVar("variable", default=1.0)
    return lambda y: y * variable.get(), partial(variable.set, 2.0)


def what_a_variable_of_the_context_has_by_default():
    variable = ContextVar("variable", default=SimpleNamespace(scale=1.0))  # noqa: B039
    return lambda y: y * variable.get().scale, partial(setattr, variable.get(), "scale", 2.0)


def a_weak_reference():
    settings = Settings()
    reference = weakref.ref(settings)
    return lambda y: y * reference().scale, lambda: setattr(settings, "scale", 2.0)


def a_mapping():
    table = {"scale": 1.0}
    proxy = MappingProxyType(table)
    return lambda y: y * proxy["scale"], partial(table.update, scale=2.0)


def a_sequence():
    values = UserList([1.0])
    return lambda y: y * values[0], partial(values.insert, 0, 2.0)


def the_order_of_a_dictionary():
    table = {"a": 1.0, "b": 2.0}
    return lambda y: y * next(iter(table.values())), lambda: table.update(a=table.pop("a"))


def a_key():
    settings = SimpleNamespace(scale=1.0)
    key = Base()
    key.settings = settings
    table = {key: 1.0}
    return lambda y: sum(y * key.settings.scale for key in table), partial(setattr, settings, "scale", 2.0)


def an_attribute_of_a_dictionary():
    table = OrderedDict()
    table.scale = 1.0
    return lambda y: weigh(table, y), partial(setattr, table, "scale", 2.0)


def bytes_that_change():
    values = bytearray(b"\1")
    return lambda y: y * values[0], partial(values.__setitem__, 0, 2)


def an_attribute_of_a_tensor():
    weight = nn.Parameter(torch.ones(()))
    weight.scale = 1.0
    return lambda y: y * weight * weight.scale, partial(setattr, weight, "scale", 2.0)


def an_attribute_of_a_parameter():
    """Of a layer, such as a factor for its learning rate."""
    layer = nn.Linear(1, 1)
    layer.weight.scale = 1.0
    return lambda y: y * layer.weight * layer.weight.scale, partial(setattr, layer.weight, "scale", 2.0)


LOSS = torch.nn.functional.mse_loss


def another_function_of_a_package():
    return lambda y: LOSS(y, y), partial(globals().__setitem__, "LOSS", torch.nn.functional.l1_loss)


def another_function_of_c():
    functions = SimpleNamespace(f=torch.sin)
    return lambda y: functions.f(y), partial(setattr, functions, "f", torch.cos)


def another_method_of_an_object():
    settings = [1.0]
    method = settings.count

    def change():
        nonlocal method
        method = settings.index

    return lambda y: y * method(1.0), change


def a_function_of_a_package_that_is_replaced():
    return lambda y: nn.functional.softplus(y), partial(setattr, nn.functional, "softplus", torch.sin)


def a_method_of_a_package_that_is_replaced():
    layer = nn.Linear(1, 1)
    return lambda y: layer(y), partial(setattr, nn.Linear, "forward", lambda self, y: y)


def a_function_that_a_module_calls():
    layer = nn.Linear(1, 1)
    return lambda y: layer(y), partial(setattr, nn.functional, "linear", lambda y, weight, bias: y)


def a_method_of_tensors():
    return lambda y: y.sin(), partial(setattr, torch.Tensor, "sin", torch.cos)


def a_variable_of_the_environment():
    return lambda y: y * float(os.getenv("SCALE", "1")), partial(os.environ.__setitem__, "SCALE", "2")


@lru_cache
def cached(scale):
    return scale


def a_cache_that_is_cleared():
    cached(1.0)
    return lambda y: y * cached(1.0), cached.cache_clear


def what_a_bounded_cache_has(typed=False):
    @lru_cache(maxsize=2, typed=typed)
    def options(name, other=None):
        return SimpleNamespace(scale=1.0)

    options("one", other=2.0)
    return lambda y: y * options("one", other=2.0).scale, partial(setattr, options("one", other=2.0), "scale", 2.0)


def a_dictionary_that_is_cached():
    @lru_cache
    def options():
        return {"scale": 1.0}

    return lambda y: y * options()["scale"], partial(options().__setitem__, "scale", 2.0)


def a_function_that_is_registered():
    @singledispatch
    def function(y):
        return y

    return lambda y: function(y), lambda: function.register(torch.Tensor, lambda y: y * 2)


def an_attribute_of_a_dispatching_function():
    @singledispatch
    def function(y):
        return y

    function.scale = 1.0
    return lambda y: weigh(function, y), partial(setattr, function, "scale", 2.0)


def an_attribute_of_a_static_method():
    method = staticmethod(weigh)
    method.scale = 1.0
    return lambda y: weigh(method, y), partial(setattr, method, "scale", 2.0)


def an_attribute_of_an_enum():
    scale = Enum("Scale", "ONE").ONE
    scale.scale = 1.0
    return lambda y: weigh(scale, y), partial(setattr, scale, "scale", 2.0)


def a_context_of_decimals():
    third = Decimal(1) / 3
    return lambda y: y * float(third + 1), partial(setcontext, Context(prec=5))


def a_function_that_is_frozen():
    scale = 1.0

    def scaled(y):
        return y * scale

    def change():
        nonlocal scale
        scale = 2.0

    functions = {"f": scaled}
    return lambda y: functions["f"](y), change


def what_is_compiled_with_an_argument_bound():
    settings = SimpleNamespace(scale=1.0)
    compiled = torch.compile(partial(weigh, settings), backend="eager")
    return lambda y: compiled(y), partial(setattr, settings, "scale", 2.0)


KIND, PACKAGE = nn.Identity, math


def another_class_of_pytorch():
    return lambda y: KIND()(y), partial(globals().__setitem__, "KIND", nn.Tanh)


def another_class_of_pytorch_in_an_object():
    settings = SimpleNamespace(kind=nn.Identity)
    return lambda y: settings.kind()(y), partial(setattr, settings, "kind", nn.Tanh)


def another_package():
    return lambda y: y * len(vars(PACKAGE)), partial(globals().__setitem__, "PACKAGE", cmath)


def a_global_that_hides_a_builtin():
    return lambda y: y * len(ascii(1)), partial(globals().__setitem__, "ascii", lambda value: "one")


def a_builtin_that_comes():
    def step(y):
        try:
            return y * BUILTIN
        except NameError:
            return y

    return step, partial(setattr, builtins, "BUILTIN", 2.0)


def the_names_of_a_class():
    kind = type("Kind", (), {"__module__": __name__, "scale": 1.0})
    return lambda y: y * kind.__dict__["scale"], partial(setattr, kind, "scale", 2.0)


def the_bases_of_a_class():
    class Base:
        pass

    class First(Base):
        pass

    class Second(Base):
        pass

    class Derived(First):
        pass

    derived = Derived()
    return lambda y: y * isinstance(derived, First), partial(setattr, Derived, "__bases__", (Second,))


def what_a_class_in_the_step_reads():
    scale = 1.0

    def step(y):
        class Local:
            by = scale

        return y * Local.by

    def change():
        nonlocal scale
        scale = 2.0

    return step, change


def a_method_of_a_dictionary_in_another_one():
    scales = {"one": 1.0}
    look_ups = {"scale": scales.get}
    return lambda y: y * look_ups["scale"]("one"), partial(scales.update, one=2.0)


def a_method_of_a_dictionary_in_partial():
    scales = {"one": 1.0}
    scale = partial(scales.get, "one")
    return lambda y: y * scale(), partial(scales.update, one=2.0)


def what_partial_in_a_list_calls():
    scales = {"one": 1.0}
    calls = [partial(scales.get, "one")]
    return lambda y: y * calls[0](), partial(scales.update, one=2.0)


def values_of_a_dictionary():
    scales = {"one": 1.0}
    values = scales.values()
    return lambda y: y * sum(values), partial(scales.update, one=2.0)


def what_a_dictionary_makes():
    scales = defaultdict(float)
    scales["one"] = 1.0
    return lambda y: y * scales["one"], partial(setattr, scales, "default_factory", int)


def an_attribute_of_a_number():
    number = type("Number", (int,), {"__module__": __name__})(1)
    number.scale = 1.0
    return lambda y: weigh(number, y), partial(setattr, number, "scale", 2.0)


def a_hook_of_a_tensor():
    weight = nn.Parameter(torch.ones(1))
    return lambda y: y * weight, partial(weight.register_hook, lambda gradient: gradient * 2)


def a_hook_of_the_node_that_accumulates_a_gradient():
    weight = nn.Parameter(torch.ones(1))
    node = torch.autograd.graph.get_gradient_edge(weight).node
    return lambda y: y * weight, partial(node.register_prehook, lambda gradients: gradients)


def an_attribute_of_pytorch():
    return lambda y: weigh(torch, y), partial(setattr, torch, "scale", 2.0)


class Named:
    def __init__(self):
        self.scales = {"one": 1.0}

    def by_name(self, y):
        return scaled(self.scales, y)

    def passed_on(self, y):
        return scaled(vars(self)["scales"], y)


def scaled(scales, y):
    return y * scales["one"]


def the_first_of_two_objects_of_one_name():
    first, second = Named(), Named()
    return lambda y: second.passed_on(first.by_name(y)), partial(first.scales.update, one=2.0)


def the_second_of_two_objects_of_one_name():
    first, second = Named(), Named()
    return lambda y: second.passed_on(first.by_name(y)), partial(second.scales.update, one=2.0)


def what_a_context_gives():
    scales = {"one": 1.0}
    context = nullcontext(scales)

    def step(y):
        with context as given:
            return scaled(given, y)

    return step, partial(scales.update, one=2.0)


def a_key_beside_a_number():
    key = Named()
    scales = {key: 1.0, 0: 1.0}
    return lambda y: y * sum(scales.values()), partial(scales.update, {key: 2.0})


def numpys_random_state():
    def step(y):
        state = np.random.get_state()
        scale = np.random.rand()
        np.random.set_state(state)
        return y * scale

    return step, np.random.rand


FAR = (
    another_class_of_pytorch,
    another_class_of_pytorch_in_an_object,
    another_package,
    a_global_that_hides_a_builtin,
    a_builtin_that_comes,
    the_names_of_a_class,
    the_bases_of_a_class,
    what_a_class_in_the_step_reads,
    a_method_of_a_dictionary_in_another_one,
    a_method_of_a_dictionary_in_partial,
    what_partial_in_a_list_calls,
    values_of_a_dictionary,
    what_a_dictionary_makes,
    an_attribute_of_a_number,
    a_hook_of_a_tensor,
    a_hook_of_the_node_that_accumulates_a_gradient,
    an_attribute_of_pytorch,
    the_first_of_two_objects_of_one_name,
    the_second_of_two_objects_of_one_name,
    what_a_context_gives,
    a_key_beside_a_number,
    numpys_random_state,
    another_function_of_a_package,
    another_function_of_c,
    another_method_of_an_object,
    a_function_of_a_package_that_is_replaced,
    a_method_of_a_package_that_is_replaced,
    a_function_that_a_module_calls,
    a_method_of_tensors,
    a_variable_of_the_environment,
    a_cache_that_is_cleared,
    what_a_bounded_cache_has,
    a_dictionary_that_is_cached,
    a_function_that_is_registered,
    an_attribute_of_a_dispatching_function,
    an_attribute_of_a_static_method,
    an_attribute_of_an_enum,
    a_context_of_decimals,
    a_function_that_is_frozen,
    what_is_compiled_with_an_argument_bound,
    an_attribute_of_a_class,
    an_attribute_of_a_metaclass,
    a_structure_of_c,
    an_attribute_that_comes,
    a_global_that_comes,
    a_variable_that_comes,
    the_order_of_an_ordered_dictionary,
    a_set_of_weak_references,
    a_table_of_a_class,
    a_class_that_is_passed_on,
    another_class,
    a_method_of_a_class,
    a_module_that_is_passed_on,
    a_class_of_a_module_that_is_not_there,
    an_import_in_a_function,
    a_name_imported_in_a_function,
    a_default,
    other_defaults,
    the_code_of_a_function,
    an_attribute_of_a_function,
    closures_of_one_code,
    an_argument_of_partial,
    what_a_partial_calls,
    the_name_of_a_class,
    a_slot_of_the_library,
    a_variable_of_the_context,
    what_a_variable_of_the_context_has_by_default,
    a_weak_reference,
    a_mapping,
    a_sequence,
    the_order_of_a_dictionary,
    a_key,
    an_attribute_of_a_dictionary,
    bytes_that_change,
    an_attribute_of_a_tensor,
    an_attribute_of_a_parameter,
)


def state_of(fn, device_type="cpu"):
    """The state of a step that has been called once."""
    calls = Calls()
    calls.watch()
    try:
        fn(torch.ones(1))
    finally:
        calls.end()
        calls.find_functions()
    state = StepState(fn, {}, device_type, [*calls.found.values()])
    if state.tensors:
        state.guard_tensors([])
    return state


def objection_to(fn, device_type="cpu"):
    """Why no graph of a step would be right, without the user's line, which is there."""
    said, lines = re.subn(r" \(see test_step_reads\.py:\d+\)", "", str(state_of(fn, device_type).objection))
    assert lines == 1, said
    return said


def test_calls_that_tell_nothing_are_looked_at_once(monkeypatch):
    """Whoever makes them: most calls of a step are of that kind, and to look at each takes longer than the step."""
    looked_at = []
    for name in ("_note_call", "_note_call_of_c"):
        original = getattr(Calls, name)

        def looks(self, frame, what, *owner, original=original):
            looked_at.append(what)
            original(self, frame, what, *owner)

        monkeypatch.setattr(Calls, name, looks)
    calls, numbers = Calls(), []
    calls.watch()
    try:
        for _ in range(5):
            numbers.append(math.sqrt(4.0))
            copy.copy(numbers)
            os.listdir()
    finally:
        calls.end()
    counted = Counter(getattr(each, "__name__", getattr(each, "co_name", None)) for each in looked_at)
    assert counted["sqrt"] == counted["append"] == counted["get"] == 1 and counted["copy"] == 2  # of Python and of C
    assert counted["listdir"] == 5 and calls.objection is not None


@pytest.mark.parametrize("make", FAR, ids=lambda make: make.__name__)
@pytest.mark.nightly_after(30)
def test_what_no_name_leads_to(monkeypatch, make):
    monkeypatch.setattr(Settings, "scale", 1.0)
    monkeypatch.setattr(Settings, "table", {"scale": 1.0})
    monkeypatch.setattr(Settings, "weigh", Settings.weigh)
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.delitem(globals(), "LATER", raising=False)
    monkeypatch.setitem(globals(), "LOSS", LOSS)
    monkeypatch.setitem(globals(), "KIND", nn.Identity)
    monkeypatch.setitem(globals(), "PACKAGE", math)
    monkeypatch.delitem(globals(), "ascii", raising=False)
    monkeypatch.delattr(builtins, "BUILTIN", raising=False)
    monkeypatch.setattr(nn.functional, "softplus", nn.functional.softplus)
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)
    monkeypatch.setattr(nn.functional, "linear", nn.functional.linear)
    monkeypatch.setattr(torch.Tensor, "sin", torch.Tensor.sin)
    monkeypatch.setattr(torch, "scale", 1.0, raising=False)
    monkeypatch.setenv("SCALE", "1")
    step, change = make()
    state = state_of(step)
    assert state.holds() and state.again().facts == state.facts and not state.objection
    copy_context().run(_and_hold_no_more, change, state)


def _and_hold_no_more(change, state):
    change()
    assert not state.holds()


@pytest.mark.parametrize("make", [a_method_of_a_dictionary_in_partial, another_method_of_an_object])
def test_what_is_frozen(make):
    """As servers do it."""
    step, change = make()
    gc.freeze()
    try:
        state = state_of(step)
    finally:
        gc.unfreeze()
        gc.freeze()  # as common.py has it
    assert state.holds()
    _and_hold_no_more(change, state)


def test_settings_that_a_step_leaves_behind(step_twins, device):
    def of(x):
        torch.backends.cuda.enable_math_sdp(False)
        return x * 2

    step = step_twins.graphed(of)
    try:
        for _ in range(4):
            torch.backends.cuda.enable_math_sdp(True)
            step(step_twins.batch()[0])
            assert not torch.backends.cuda.math_sdp_enabled()
    finally:
        torch.backends.cuda.enable_math_sdp(True)
    assert "torch.backends.cuda.enable_math_sdp() changed from True to False" in str([*step.in_python])


def test_an_order_of_kernels_that_a_step_leaves_behind(step_twins, device):
    def of(x):
        settings.enter_context(sdpa_kernel([SDPBackend.MATH, *order[:-1]], set_priority=True))
        return x * 2

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    step = step_twins.graphed(of)
    with ExitStack() as settings:
        for _ in range(4):
            settings.close()
            settings.enter_context(sdpa_kernel(order, set_priority=True))
            step(step_twins.batch()[0])
    assert "the priorities of torch.nn.attention.sdpa_kernel() changed from '[" in str([*step.in_python])


def test_a_gradient_that_is_looked_up_unseen(step_twins, device):
    weight, gradient_of = torch.nn.Parameter(torch.ones(4, device=device)), attrgetter("grad")
    step = step_twins.graphed(lambda x: x * weight.detach() * (1 if gradient_of(weight) is None else 2))
    for i in range(6):
        weight.grad = torch.ones_like(weight) if i == 5 else None
        x = step_twins.batch()[0]
        assert torch.equal(step(x), x * (1 if i < 5 else 2))
    assert "gradient_of is an attrgetter of what is not compared before a replay" in str([*step.in_python])


@pytest.mark.parametrize("write", [lambda t: t.data.fill_(2), lambda t: t.numpy().fill(2), lambda t: t.add_(1)])
@pytest.mark.parametrize("made", [torch.ones, torch.inference_mode()(torch.ones)], ids=["plain", "inference"])
@pytest.mark.nightly_after(2)
def test_a_tensor_on_the_host_of_a_step_on_a_gpu(write, made):
    values = made(3)
    state = state_of(lambda y: y * values[0].item(), "cuda")
    assert state.holds()
    with torch.inference_mode():
        write(values)
    assert not state.holds()


def test_a_big_tensor_on_the_host_of_a_step_on_a_gpu():
    values = torch.ones(20_000)
    objection = objection_to(lambda y: y * values[0].item(), "cuda")
    assert objection.startswith("values is a tensor of 80,000 bytes on the CPU") and objection.endswith("to cuda")
    assert not state_of(lambda y: y * values[0].item()).objection  # beside the graph's own memory


def test_a_cache_that_cannot_be_compared():
    step, _ = what_a_bounded_cache_has(typed=True)
    assert objection_to(step) == "what options has cached is not compared before a replay; drop typed=True"


def test_names_of_all_modules():
    objection = objection_to(lambda y: y * len(sys.modules))
    said = "sys.modules leads to all modules, which are not compared before a replay; import those that the step needs"
    assert objection == said


def test_names_that_globals_gives():
    calls = Calls()
    calls.watch()
    with suppress(CaptureRefused):
        globals()["SCALE"]
    calls.end()
    assert str(calls.objection).startswith(
        "what globals() gives is not compared before a replay, at test_step_reads.py:"
    )


UNCOMPARED = {
    "open": lambda: open(__file__).close(),
    "stat": lambda: os.path.exists(__file__),
    "eval": lambda: eval("1"),
    "import_module": lambda: import_module("os"),
    "_getframe": lambda: inspect.currentframe(),
    "__subclasses__": lambda: Settings.__subclasses__(),
    "cache_info": lambda: lru_cache(len).cache_info(),
    "getweakrefcount": lambda: weakref.getweakrefcount(Settings),
    "active_count": threading.active_count,
    "uuid1": uuid.uuid1,
    "getline": lambda: linecache.getline(__file__, 1),
    "getsignal": lambda: signal.getsignal(signal.SIGINT),
}


@pytest.mark.parametrize("name", UNCOMPARED)
def test_what_is_not_compared(name):
    calls = Calls()
    calls.watch()
    with suppress(CaptureRefused):
        (lambda: UNCOMPARED[name]())()
    calls.end()
    assert calls.objection is not None
    said = "the step opens a file" if name == "open" else f"what {name}() gives is not compared before a replay"
    # Where Python lacks the system's function, uuid1() reads the clock itself.
    clock = "time_ns() returns another value in each call" if name == "uuid1" else said
    assert str(calls.objection).startswith((f"{said}, at test_step_reads.py:", f"{clock}, at test_step_reads.py:"))


STEADY = (
    *(lambda: re.sub("a", "b", "a"), lambda: sys.intern("a"), lambda: struct.pack("d", 1.0), lambda: copy.copy([1])),
    *(lambda: hashlib.sha256(b"a").hexdigest(), lambda: os.fspath("a"), gc.collect),
    *(lambda: logging.getLogger("a").debug("a"), lambda: datetime(2000, 1, 1).isoformat(), lambda: math.sqrt(2)),
    lambda: warnings.warn("a", stacklevel=2),
)


@pytest.mark.filterwarnings("ignore:a:UserWarning")
@pytest.mark.parametrize("call", STEADY)
def test_what_depends_on_its_arguments_alone(call):
    calls = Calls()
    calls.watch()
    (lambda: call())()
    calls.end()
    assert calls.objection is None


def test_hooks_are_looked_for_in_inference_mode():
    weight = nn.Parameter(torch.ones(1))
    node = torch.autograd.graph.get_gradient_edge(weight).node
    handle = node.register_hook(print)
    with torch.inference_mode():
        assert [*hooks_of(weight)] == [print]
        handle.remove()
        assert [*hooks_of(weight)] == []


def test_how_often_a_tensor_was_written_to(step_twins):
    step = step_twins.graphed(lambda y: y * SCALE * [y][0]._version)
    for _ in range(3):
        step(step_twins.batch()[0])
    assert step.captures == 0 and "what _version gives is not compared before a replay" in str([*step.in_python])


@pytest.mark.parametrize("draw", [random.random, random.Random])
def test_random_numbers_of_python_that_are_put_back(draw):
    calls = Calls()
    state = random.getstate()
    calls.watch()
    draw()
    calls.end()
    random.setstate(state)
    assert calls.objection is not None and str(calls.objection).count("no replay would") == 1, calls.objection


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Condition])
def test_locks(make):
    value = make()
    objection = objection_to(lambda y: y * bool(value))
    assert objection == "value is a lock, which no replay would take; call what takes it outside of the step"


class Locked:
    lock, scale = threading.Lock(), 1.0


def test_a_lock_of_a_class(step_twins):
    def locked(settings, y):
        with settings.lock:
            return y * settings.scale

    settings = Locked()
    steps = [step_twins.graphed(lambda y: locked(settings, y)), step_twins.graphed(lambda y: weigh(settings, y))]
    for step in (*steps, *steps, *steps, *steps):
        step(step_twins.batch()[0])
    assert "lock is a lock, which no replay would take" in str(explain(steps[0])) and steps[0].captures == 0
    assert steps[1].captures == 1  # it does not take the lock


class Mapped(mmap.mmap):
    scale = 1.0


@pytest.mark.parametrize(
    "make",
    [lambda: mmap.mmap(-1, 1), lambda: Mapped(-1, 1), lambda: sqlite3.connect(":memory:"), lambda: hashlib.sha256(b"")],
    ids=["mmap", "a class of the user's", "sqlite3", "hashlib"],
)
def test_content_that_cannot_be_seen(make):
    value = make()
    objection = objection_to(lambda y: y * bool(value))
    assert re.search("value is a .*, whose content is not compared before a replay; read what", objection)
    objection = objection_to(lambda y: y * bool([value][0]))
    assert objection.startswith("value is a ")
    getattr(value, "close", bool)()  # or Python 3.13 warns


class Slotted:
    __slots__ = ("scale",)


def test_a_slot_that_is_looked_up_by_its_descriptor():
    get, settings = Slotted.scale.__get__, Slotted()
    settings.scale = 1.0
    for step in (lambda y: y * get(settings), lambda y: y * Slotted.scale.__get__(settings)):
        assert "is a slot, and what objects have there is not compared before a replay" in objection_to(step)
    assert not state_of(lambda y: weigh(settings, y)).objection


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("of", [lambda module: module, lambda module: module.forward, nn.Sequential])
def test_torchscript_keeps_its_attributes_in_c(of):
    value = of(torch.jit.script(nn.Identity()))
    assert "is of TorchScript, whose content is not compared before a replay" in objection_to(lambda y: value(y))


@pytest.mark.parametrize(
    "value",
    [
        *(
            re.compile("a"),
            datetime(2000, 1, 1),
            struct.Struct("d"),
            slice(1),
            property(len),
            itemgetter(1),
            KeyError(),
        ),
        *(UserList(), SimpleNamespace(), np.dtype("f4"), Settings(), list[int], ABC, Pair),
        *(torch.Generator(), MappingProxyType({}), Fraction(1, 2), Point(1.0), random.random.__self__, timedelta(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_content_that_is_compared_or_constant(value):
    values = [value]
    assert not state_of(lambda y: (y, values[0])).objection


def test_an_array_of_objects():
    values = np.array([{}], dtype=object)
    objection = objection_to(lambda y: y * len(values[0]))
    assert objection == "values is an array of objects, which are not compared before a replay; make it a list"


def test_a_file_that_is_read():
    with open(__file__) as file:
        objection = StepState(lambda y: y * len(file.readline()), {}, "cpu").objection
    assert "file is a TextIOWrapper, which no replay would advance" in str(objection)
    assert str(objection).endswith("; read what the step needs, and write what it returns, outside of the step")


def test_what_is_too_deep_to_compare():
    deep = [1.0]
    for _ in range(10):
        deep = [deep]
    objection = objection_to(lambda y: y * torch.tensor(deep).sum())
    assert "is 8 levels below what the step reads" in objection and objection.endswith("not pass on all of deep")


def test_what_changes_is_named_before_what_is_too_deep(step_twins):
    """The loop of a trainer is both, and only the first is what to mend."""
    trainer = SimpleNamespace(steps=0, loop=[1.0])
    for _ in range(10):
        trainer.loop = [trainer.loop]

    def count(trainer, y):
        trainer.steps += len(vars(trainer)) - 1
        return y

    def make(model):
        trainer.steps = 0
        return make_step(lambda y: count(trainer, y))(model)

    step = step_twins.train(make)
    said = "; ".join(step.in_python)
    assert step.captures == 0 and "levels below" not in said
    assert re.search(
        r"trainer\.steps changed from \d to \d \(see test_step_reads\.py:\d+\), in the step; do that", said
    )


def test_an_enumeration_far_down_is_compared():
    """Its members lead to its class, and so to the bases of that."""

    class Base(Enum):
        pass

    deep = Base("Mode", "ONE TWO THREE").TWO
    for _ in range(4):
        deep = [deep]
    assert not state_of(lambda y: y * len(str(deep))).objection


def test_a_mode_that_a_step_leaves_behind(step_twins):
    def of(y):
        torch.set_grad_enabled(True)
        return y * 2

    step = step_twins.graphed(of)
    for _ in range(4):
        with torch.no_grad():
            step(step_twins.batch()[0])
            assert torch.is_grad_enabled()
    assert "torch.is_grad_enabled() changed from False to True, in the step" in str([*step.in_python])


def test_an_argument_that_the_step_changes_by_another_name(step_twins):
    """In the call that captures, too."""
    model = step_twins.model()
    weight = model.get_parameter("0.weight")
    inner = make_step(lambda y: y)(model)

    def step(x, y, view):
        inner(x, y)
        return view * 1

    step = step_twins.graphed(step)
    for i in range(5):
        view = weight.detach()
        result = step(*step_twins.batch(), view if i else view.clone())
        assert not i or torch.equal(result, view)
    assert step.captures == 0 and "an argument shares memory" in str([*step.in_python])


@pytest.mark.parametrize("make", [queue.SimpleQueue, queue.Queue])
def test_queues(step_twins, make):
    value = make()
    for _ in range(9):
        value.put(1.0)
    step = step_twins.graphed(lambda x: x * value.get())
    for _ in range(4):
        step(step_twins.batch()[0])
    assert step.captures == 0 and "which no replay would advance" in str([*step.in_python])
    assert value.qsize() == 5


def test_tensors_on_several_devices(monkeypatch):
    weight = nn.Parameter(torch.ones(1))
    state = StepState(lambda y: y * weight, {}, "cpu")
    monkeypatch.setattr(StepState, "device", torch.device("meta"))
    with pytest.raises(CaptureRefused, match="uses tensors on meta and on cpu, and a graph is on one device"):
        state.guard_tensors([])
    state = StepState(lambda y: y, {}, "cpu")
    with pytest.raises(CaptureRefused, match="uses tensors on meta and on cpu, and a graph is on one device"):
        state.guard_tensors([torch.ones(1)])


class Raising:
    """Looks up all that it lacks in a dictionary, as the configurations of some do."""

    __slots__ = ("values",)

    def __init__(self, **values):
        self.values = values

    def __getattr__(self, name):
        return self.values[name]


def test_an_object_that_raises_another_error(step_twins):
    settings = Raising(scale=1.0)

    def between(i, *_):
        settings.values["scale"] = 2.0 if 4 <= i < 9 else 1.0

    step = step_twins.train(make_step(lambda y: y * settings.scale), 10, between)
    assert step.captures == 2, explain(step)


def test_functions_that_differ_in_their_defaults():
    """As those that a loop makes with ``lambda y, settings=settings:``."""
    settings = [SimpleNamespace(scale=1.0) for _ in range(3)]
    functions = [lambda y, each=each: y * each.scale for each in settings]
    state = state_of(lambda y: [function(y) for function in functions])
    for each in settings:
        assert state.holds()
        each.scale = 2.0
        assert not state.holds()
        each.scale = 1.0


def test_functions_with_other_globals():
    code = (lambda y: y * SCALE).__code__
    functions = [FunctionType(code, {"SCALE": 1.0, "__name__": __name__}) for _ in range(3)]
    state = state_of(lambda y: [function(y) for function in functions])
    for each in functions:
        assert state.holds()
        each.__globals__["SCALE"] = 2.0
        assert not state.holds()
        each.__globals__["SCALE"] = 1.0


@pytest.mark.parametrize("load", [np.load, np.loadtxt, np.fromfile, np.memmap])
def test_a_file_that_a_package_reads(load, tmp_path):
    np.save(tmp_path / "a.npy", np.ones(1))
    (tmp_path / "a.txt").write_text("1.0")
    path = tmp_path / ("a.txt" if load is np.loadtxt else "a.npy")
    calls = Calls()
    calls.watch()
    (lambda: load(path))()
    calls.end()
    said = r"(is not compared before a replay|the step opens a file), at test_step_reads.py"
    assert calls.objection is not None and re.search(said, str(calls.objection))


TIMES = ContextVar("TIMES", default=1.0)


def test_a_context_variable_that_gets_new_numbers(step_twins):
    """A new number may have the identity of one that is gone."""
    step = step_twins.graphed(lambda x: x * TIMES.get())
    x, token = torch.ones(3, device=step_twins.device), TIMES.set(1.0)
    for i in range(40):
        TIMES.set(float(f"{1 + i // 5}"))
        assert torch.equal(step(x), x * (1 + i // 5))
    TIMES.reset(token)
    assert step.replays >= 12, explain(step)


class OfThread(threading.local):
    scale = 1.0


def test_what_each_thread_has_for_itself(step_twins):
    settings, found = OfThread(), []
    step = step_twins.graphed(lambda y: weigh(settings, y))
    x = torch.ones(3, device=step_twins.device)

    def calls(scale):
        settings.scale = scale
        found.extend(step(x) for _ in range(4))

    for scale in (1.0, 2.0):
        on_threads(partial(calls, scale))
    assert torch.equal(torch.stack(found), x * torch.tensor([[1.0]] * 4 + [[2.0]] * 4, device=x.device))
    assert step.replays == 4, explain(step)


def test_a_sequence_whose_items_are_sequences_without_end():
    text = UserString("1")
    assert "levels below what the step reads" in objection_to(lambda y: y * float(str([text][0])))


@pytest.mark.parametrize("of", ["tensor", "edge"])
def test_a_hook_of_a_node_that_was_made_before_the_step(step_twins, of):
    """Nobody can ask a node of autograd for its hooks."""

    def run(graphed):
        weight = torch.ones(2, device=step_twins.device, requires_grad=True)
        doubled = weight * 2
        tripled = doubled * 3
        root = tripled if of == "tensor" else torch.autograd.graph.get_gradient_edge(tripled)

        def step(x):
            return torch.autograd.grad([root], [weight], x, retain_graph=True)[0]

        step, found = graphed(step), []
        for i in range(6):
            if i == 4:
                doubled.grad_fn.register_prehook(lambda gradients: (gradients[0] * 5,))
            found.append(step(torch.ones(2, device=step_twins.device)))
        return found, step

    step = step_twins.both(run)
    said = "is a node of autograd's graph" if of == "edge" else "the history that root has|detach what you keep"
    assert step.replays == 0 and re.search(said, str([*step.in_python])), step.in_python


KNOWN: set[object] = set()
TABLE: dict[torch.Tensor, int] = {}


@pytest.mark.parametrize(
    "is_known",
    [
        lambda x: id(x) in KNOWN,
        lambda x: hash(x) in KNOWN,
        lambda x: x.data_ptr() in KNOWN,
        lambda x: x._is_view(),
        lambda x: x in TABLE,
        lambda x: any(x is each for each in TABLE),
    ],
    ids=["id", "hash", "data_ptr", "is_view", "key", "is"],
)
def test_which_tensor_an_argument_is(step_twins, is_known):
    """A replay has a copy of it, at one place."""
    known = torch.ones(9, device=step_twins.device)[6:]
    KNOWN.update((id(known), hash(known), known.data_ptr()))
    TABLE[known] = 1
    step = step_twins.graphed(lambda x: x * (2 if is_known(x) else 1))
    try:
        for i in range(6):
            assert step(known if i > 3 else torch.ones(3, device=step_twins.device))[0].item() == 1 + (i > 3)
    finally:
        KNOWN.clear()
        TABLE.clear()


def test_named_tensors(step_twins):
    step, x = step_twins.graphed(lambda x: x * (2 if x.names[0] else 1)), torch.ones(3, device=step_twins.device)
    for i in range(6):
        assert step(x.rename("n") if i > 3 else x).rename(None)[0].item() == 1 + (i > 3)
    assert step.replays == 2, step.in_python


@pytest.mark.parametrize(
    "read",
    [
        np.from_dlpack,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: [str(x.sum())[len("tensor(") : -1]],
        lambda x: [f"{x.sum()!r}"[len("tensor(") : -1]],
    ],
    ids=["dlpack", "pickle", "str", "repr"],
)
def test_values_that_a_library_reads(read):
    """On a GPU, neither can be captured."""
    step = graphed_step(lambda x: x * float(read(x)[0]), backend="tape")
    for i in range(4):
        assert step(torch.ones(1) + i).item() == (1 + i) ** 2
    assert "reads a tensor on the host" in str([*step.in_python]), step.in_python


@pytest.mark.parametrize(
    "do",
    [
        lambda folder: (folder / "a").rename(folder / "b"),
        lambda folder: os.system(f"mv {folder}/a {folder}/b"),
        lambda folder: subprocess.run(["mv", folder / "a", folder / "b"]),
        lambda folder: torch.save(1, folder / "b") or os.remove(folder / "a"),
        lambda folder: torch.set_num_threads(torch.get_num_threads() + 1) or (folder / "a").rename(folder / "b"),
    ],
    ids=["rename", "system", "subprocess", "save", "threads"],
)
def test_what_nothing_undoes_happens_once(do, tmp_path):
    """Not in a capture that fails, too."""
    step, threads = graphed_step(lambda x: do(tmp_path), backend="tape"), torch.get_num_threads()
    for _ in range(4):
        (tmp_path / "a").touch()
        step(torch.ones(1))
        assert os.listdir(tmp_path) == ["b"]
        (tmp_path / "b").unlink()
    assert "do that outside of the step" in str([*step.in_python]), step.in_python
    assert torch.get_num_threads() - threads in (0, 4)
    torch.set_num_threads(threads)


COUNTED = 0


class HasOneSubclass:
    pass


class TheSubclass(HasOneSubclass):
    variables = globals()


@pytest.mark.parametrize(
    "find",
    [
        lambda: globals(),
        lambda: sys._getframe().f_globals,
        lambda: vars(import_module(__name__)),
        lambda: eval("globals()"),
        lambda: HasOneSubclass.__subclasses__()[0].variables,
    ],
    ids=["globals", "_getframe", "import_module", "eval", "__subclasses__"],
)
def test_what_no_name_leads_to_changes_once(find):
    """Not in a capture that fails, too."""

    def fn(x):
        find()["COUNTED"] += 1
        return x * 2

    step, before = graphed_step(fn, backend="tape"), COUNTED
    for calls in range(1, 5):
        step(torch.ones(1))
        assert COUNTED - before == calls
    assert "is not compared before a replay" in str([*step.in_python]), step.in_python


def test_an_attribute_of_a_result(step_twins):
    def step(x):
        x = x * 2
        x.scale = 2
        return x

    step = step_twins.graphed(step)
    assert [step(torch.ones(1, device=step_twins.device)).scale for _ in range(4)] == [2] * 4
    assert "a result has the attribute scale" in str([*step.in_python]), step.in_python


def test_a_nested_tensor_without_strides():
    step = graphed_step(lambda x: torch.nested.nested_tensor([x]).to_padded_tensor(0.0)[0], backend="tape")
    assert [step(torch.ones(2)).tolist() for _ in range(4)] == [[1, 1]] * 4
    assert "make it with layout=torch.jagged" in str([*step.in_python]), step.in_python


@pytest.mark.parametrize("kind", ["requires_grad", "grad", "vjp", "hessian", "functionalize"])
@pytest.mark.nightly_after(3)
def test_a_step_that_is_differentiated(kind):
    def step(x):
        return (x * x).sin().sum()

    def differentiate(step, x):
        if kind == "requires_grad":
            x = x.requires_grad_()
            return torch.autograd.grad(step(x), x)[0]
        return torch.func.vjp(step, x)[1](torch.ones(()))[0] if kind == "vjp" else getattr(torch.func, kind)(step)(x)

    graphed = graphed_step(step, backend="tape")
    for _ in range(3):
        graphed(torch.ones(3))
    assert torch.equal(differentiate(graphed, torch.ones(3)), differentiate(step, torch.ones(3)))
    assert graphed.replays == 1


@pytest.mark.parametrize("is_attribute", [True, False])
def test_an_object_of_pythons_library_that_another_one_holds(step_twins, is_attribute):
    stopped, x = threading.Event(), torch.ones(1, device=step_twins.device)
    holder = SimpleNamespace(stopped=stopped) if is_attribute else [stopped]

    def is_stopped(holder):
        return (holder.stopped if is_attribute else holder[0]).is_set()

    step = step_twins.graphed(lambda: x * (1 + is_stopped(holder)))
    for i in range(8):
        if i == 4:
            stopped.set()
        assert step().item() == 1 + i // 4
    assert step.replays == 4, step.in_python


class Labels(dict):
    """A dictionary that may have attributes."""


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.ones(2, device=device),
        lambda _: partial(len),
        lambda _: np.ones(1).view(ScaleOfArray),
        lambda _: lambda: None,
        lambda _: Labels(),
        lambda _: CellType(1.0),
        lambda _: lru_cache(len),
    ],
    ids=["tensor", "partial", "array", "function", "dictionary", "cell", "cached"],
)
@pytest.mark.nightly_after(3)
def test_what_a_value_is_given_later(step_twins, make):
    """As ``weight.main_grad``, which the step looks for by a name that no bytecode has next to the weight."""

    def run(graphed):
        value, results = make(step_twins.device), []
        owner, name = SimpleNamespace(value=value), "cell_contents" if isinstance(value, CellType) else "main_grad"
        step = graphed(lambda x: x * getattr(getattr(owner, "value"), name, 2.0))  # noqa: B009
        for i in range(8):
            if i == 5:
                setattr(value, name, 3.0)
            results.append(step(torch.ones(2, device=step_twins.device)))
        return results, step

    step = step_twins.both(run)
    assert step.captures == 2, explain(step)


@pytest.mark.parametrize("name", ["retains_grad", "__closure__"])
def test_attributes_in_c_that_are_not_compared(step_twins, name):
    value = torch.ones(2, requires_grad=True) * 1 if name == "retains_grad" else step_twins.train
    read = {"retains_grad": lambda of: of.value.retains_grad, "__closure__": lambda of: of.value.__closure__}[name]
    step = step_twins.graphed(lambda x: x * (2.0 if read(SimpleNamespace(value=value)) else 3.0))
    for _ in range(4):
        step(torch.ones(2, device=step_twins.device))
    assert step.captures == 0
    assert f"what {name} gives is not compared before a replay, at test_step_reads.py:" in str([*step.in_python])


class ScaleOfItem(dict):
    def scale(self):
        return super().__getitem__("scale")


class ScaleOfAll(OrderedDict):
    def scale(self):
        values = super().values
        return max(values())


class ScaleOfFirst(list):
    def scale(self):
        return super().__getitem__(0)


class ScaleOfSize(set):
    def scale(self):
        return float(super().__len__())


class ScaleOfAttribute(SimpleNamespace):
    def scale(self):
        return super().__getattribute__("value")


class ScaleOfArguments(list):
    def scale(*args):
        return max(args[0])


class ScaleOfArray(np.ndarray):
    def scale(self):
        return float(super().__getitem__(0))


@pytest.mark.parametrize(
    ("holder", "change"),
    [
        (ScaleOfItem(scale=1.0), lambda holder: holder.update(scale=3.0)),
        (ScaleOfAll(scale=1.0), lambda holder: holder.update(scale=3.0)),
        (ScaleOfArguments([1.0]), lambda holder: holder.insert(0, 3.0)),
        (ScaleOfFirst([1.0]), lambda holder: holder.insert(0, 3.0)),
        (ScaleOfSize([1]), lambda holder: holder.update([2, 3])),
        (ScaleOfAttribute(value=1.0), lambda holder: setattr(holder, "value", 3.0)),
        (np.ones(1).view(ScaleOfArray), lambda holder: holder.fill(3.0)),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.nightly_after(2)
def test_what_a_method_reads_by_no_name(step_twins, holder, change):
    """By ``super()``, or by ``*args``."""
    holder = copy.deepcopy(holder)
    step = step_twins.graphed(lambda x: x * holder.scale())
    for i in range(8):
        if i == 4:
            change(holder)
        assert step(torch.ones(1, device=step_twins.device)).item() == (1 if i < 4 else 3)
    assert step.captures == 2, step.in_python


class Bound:
    """A decorator of methods that only an object can look up: from the class it raises."""

    def __init__(self, function):
        self.function = function

    def __get__(self, owner, kind=None):
        return types.MethodType(self, owner)

    def __call__(self, *args):
        return self.function(*args)


class Bounded:
    scale = 1.0

    @Bound
    def __call__(self, x):
        return x * self.scale

    @Bound
    def scaled(self, x):
        return x * self.scale


class BoundedModule(nn.Module):
    scale = 1.0

    @Bound
    def forward(self, x):
        return x * self.scale


def passed_on(owner):
    return owner.scale


@pytest.mark.parametrize("name", ["a method", "a call", "a module"])
def test_a_method_that_only_an_object_can_look_up(step_twins, name):
    owner = BoundedModule() if name == "a module" else Bounded()
    scale = (lambda x: owner.scaled(x)) if name == "a method" else (lambda x: owner(x))
    step = step_twins.graphed(lambda x: scale(x) + passed_on(owner))
    for i in range(12):
        owner.scale = 1.0 + i // 6
        assert step(torch.ones(1, device=step_twins.device)).item() == 2.0 * (1 + i // 6)
    assert step.captures == 2 and step.replays >= 4, step.in_python


class Sulking(dict):
    """Raises when somebody looks at what it holds, once it is told to."""

    is_open = True

    def __len__(self):
        if not self.is_open:
            raise RuntimeError("it is closed")
        return super().__len__()

    def open_or_close(self, is_open):
        type(self).is_open = is_open
        return 1.0


@pytest.mark.parametrize("closes", ["before", "between", "in the step"])
def test_an_object_that_raises_when_it_is_looked_at(step_twins, closes, monkeypatch):
    """The call runs in Python, once."""
    monkeypatch.setattr(Sulking, "is_open", closes != "before")
    held, calls = Sulking(scale=2.0), []

    def step(x, is_open=True):
        calls.append(x)
        if closes == "in the step":
            held.open_or_close(is_open)
        return x * dict.__getitem__(held, "scale")

    graphed, x = step_twins.graphed(step), torch.ones(1, device=step_twins.device)
    for i in range(8):
        if closes == "between" and i == 5:
            Sulking.is_open = False
        assert graphed(x, *([i < 5] if closes == "in the step" else [])).item() == 2.0
    if closes == "before":
        assert len(calls) == 8 and not graphed.replays
    said = "cannot be compared before a replay, since it raises RuntimeError: it is closed; read what the step needs"
    assert said in str([*graphed.in_python]), graphed.in_python


def test_an_object_that_passes_for_a_module(step_twins):
    layer = Mock(spec=nn.Linear(1, 1), scale=2.0)
    step, x = step_twins.graphed(lambda x: x * layer.scale + passed_on(layer)), torch.ones(1, device=step_twins.device)
    for _ in range(4):
        assert step(x).item() == 4.0
    assert "cannot be compared before a replay" in str([*step.in_python]), step.in_python


class Loud(Labels):
    """The same with another attribute of its class."""

    main_grad = 3.0


class Quiet(float):
    main_grad = 2.0


class Louder(float):
    main_grad = 3.0


@pytest.mark.parametrize(
    ("make", "name", "gets"),
    [
        (Labels, "__dict__", {"main_grad": 3.0}),
        (Labels, "__class__", Loud),
        (Quiet, "__dict__", {"main_grad": 3.0}),
        (Quiet, "__class__", Louder),
    ],
)
def test_a_value_that_gets_other_attributes_or_another_class(step_twins, make, name, gets):
    value, x = make(), torch.ones(1, device=step_twins.device)
    owner = SimpleNamespace(value=value)
    step = step_twins.graphed(lambda x: x * getattr(owner.value, "main_grad", 2.0))
    for i in range(8):
        if i == 4:
            setattr(value, name, gets)
        assert step(x).item() == (2.0 if i < 4 else 3.0)
    assert step.captures == 2, step.in_python


def test_a_dictionary_whose_items_are_its_attributes(step_twins):
    """It is compared once, so that a tensor in it may be carried."""

    def run(graphed):
        kept = Labels(total=torch.zeros((), device=step_twins.device), scale=1.0)
        kept.__dict__ = kept

        def add(kept, x):
            kept.total = kept["total"] * kept.scale + x.sum()

        step, found = graphed(lambda x: add(kept, x)), []
        for i in range(12):
            if i == 8:
                kept["scale"] = 0.5
            step(step_twins.batch()[0])
            found.append(kept.total.clone())
        return found, step

    step = step_twins.both(run)
    assert step.captures == 2 and step.replays >= 7, step.in_python
