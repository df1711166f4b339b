"""What makes Thunder and Inductor compile faster in tests, in each process that compiles."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import torch
import torch._dynamo
from thunder.core import interpreter
from torch._dynamo import guards
from torch._inductor import config as inductor_config, cpp_builder, cpu_vec_isa
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from thunder_cg.compat.tracing import faster_tracing

# Plain functions, and references without graphs, compile in a third of the time as well.
_faster = faster_tracing()
_faster.__enter__()


def _callers(context: int = 1) -> list[inspect.Traceback]:
    """The function that calls this one, and two more."""
    frames = [sys._getframe(depth) for depth in (1, 2, 3)]
    return [inspect.getframeinfo(frame, context=0) for frame in frames]


# It asks for the whole stack, with source lines, to know who called: a tenth of the time, as pytest's stack is deep.
interpreter.inspect = types.SimpleNamespace(**{**vars(inspect), "stack": _callers})

# That vectors compile, it would find out in seconds. Whether what was compiled for rarer instructions can be loaded, it
# asks processes that import PyTorch.
inductor_config.cpp.vec_isa_ok = True
cpu_vec_isa.subprocess = types.SimpleNamespace(
    **{**vars(subprocess), "check_call": lambda command, **_: exec(command[-1], {})}
)

# A C++ kernel of tests is small. Most of what -O3 takes, it takes for the headers.
_flags = cpp_builder._get_optimization_cflags
cpp_builder._get_optimization_cflags = lambda compiler, *_: _flags(compiler, min_optimize=True)

# It times several ways to run a kernel and takes the fastest. A model's twin would get another one, whose sums
# differ in the last bit. So all are equally fast, and it takes the first.
CachingAutotuner.bench = lambda self, *args, **kwargs: 1.0

# Dynamo measures how long its guards take, after it has flushed the processor's caches, and collects garbage.
guards.profile_guard_manager = lambda *args: 0.0
torch._dynamo.config.run_gc_after_compile = False

if not torch.cuda.is_available():  # each seed would be kept, with a traceback, for three kinds of devices
    torch.manual_seed = torch.default_generator.manual_seed

# Workers of pytest share the cores.
torch.set_num_threads(1)
