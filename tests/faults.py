"""Makes ops of compiled regions, and steps of captures and replays, fail on demand."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

from thunder_cg.compat import cuda
from thunder_cg.report.programs import locate
from thunder_cg.runtime.cuda import copy_nodes
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.program_inputs import Moves
from thunder_cg.runtime.region import RuntimeRegion

Fault = Callable[[torch.device], None]


class Broken(Exception):
    """What nobody expects."""


def exception(device: torch.device) -> None:
    raise Broken("a fault. With details")


def out_of_memory(device: torch.device) -> None:
    raise torch.OutOfMemoryError(f"out of memory on {device}. Tried to allocate 1.00 GiB")


def host_sync(device: torch.device) -> None:
    """Harmless in an eager run, and what no capture admits."""
    torch.ones(2, device=device).sum().item()


def transfer(device: torch.device) -> None:
    """As `host_sync`, but the error comes from a copy."""
    if device.type == "cuda":
        torch.ones(2, device=device).cpu()
    else:
        torch.ones(2, device=device).nonzero()


def failed_launch(device: torch.device) -> None:
    """A kernel launch that the driver refuses; the error does not stick."""
    if device.type == "cuda":
        kernels = copy_nodes._kernels(torch.cuda.current_device())
        assert kernels is not None
        stream = torch.cuda.current_stream().cuda_stream
        cuda.check(cuda.driver.cuLaunchKernel(kernels[4], 1, 1, 1, 4096, 1, 1, 0, stream, 0, 0))
    raise RuntimeError("CUDA error: invalid configuration argument")


class Switch:
    """Fails ``times`` times, after having let ``skip`` others pass."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.hits = 0
        self._skip = self._times = 0

    def arm(self, fault: Fault, *, skip: int = 0, times: int = 1) -> None:
        self.fault, self._skip, self._times, self.hits = fault, skip, times, 0

    def disarm(self) -> None:
        self.fault = None

    def __call__(self, device: torch.device) -> None:
        if self.fault is None:
            return
        if self._skip:
            self._skip -= 1
        elif self._times:
            self._times -= 1
            self.hits += 1
            self.fault(device)


class _Namespace:
    """A module or a class, from which the ops of a trace are called."""

    def __init__(self, of: Any, wrap: Callable[[Any], Any]) -> None:
        self._of, self._wrap = of, wrap

    def __getattr__(self, name: str) -> Any:
        return self._wrap(getattr(self._of, name))


class FaultyRegion:
    """A region whose op number ``op`` goes through a switch before it runs."""

    def __init__(self, region: RuntimeRegion) -> None:
        self.region = region
        self.switch = Switch()
        self.op = -1
        self._position = 0
        self._at = sys.maxsize  # the instruction that called last
        function = region._functions[False, False]
        names = {name: self._wrap(value) for name, value in function.__globals__.items() if name != "__builtins__"}
        injected = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        region._functions[False, False] = injected

    def arm(self, op: int, fault: Fault, *, times: int = 1) -> None:
        self.op = op
        self.switch.arm(fault, times=times)

    def _wrap(self, value: Any) -> Any:
        if isinstance(value, ModuleType) or value is torch.Tensor:
            return _Namespace(value, self._wrap)
        if not callable(value) or isinstance(value, type):  # torch.device("cpu") is no op
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._at = self._at, sys._getframe(1).f_lasti
            self._position = self._position + 1 if self._at > before else 0  # no loops: it has begun anew
            if self._position == self.op:
                self.switch(self.region.device)
            return value(*args, **kwargs)

        return call


def programs(jfn: Any) -> list[Program]:
    return [located.program for located in locate(jfn).programs]


def forget(jfn: Any) -> None:
    """Has a compiled module begin anew, as if it had just been compiled."""
    jfn._forward_fn._entries, jfn._forward_fn._calls = {}, []
    for program in programs(jfn):
        program.pair.recordings, program.pair.moves = [], Moves()
        program._warm.clear()
        program.counts.fallbacks.clear()
        for region in program.regions:
            region.failure, region.failed_attempts, region.stays_eager = None, 0, False
    gc.collect()


def arenas(jfn: Any) -> Iterator[Any]:
    for program in programs(jfn):
        yield from program.pair._used
