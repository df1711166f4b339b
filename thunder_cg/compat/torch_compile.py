"""Private names of Dynamo and Inductor, for all but ``thunderfx``. Checked with torch 2.9, 2.10 and 2.11."""

from __future__ import annotations

import importlib
import linecache
import re
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.exc
import torch._inductor.inductor_prims
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.external_utils import wrap_inline
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_cg.compat.guards import names_of
from thunder_cg.compat.settings import disable_dispatch_modes
from thunder_cg.compat.tensors import tree_map_only

# What `torch.compile` raises where it cannot compile a function, before any of it runs.
CompileError = TorchDynamoException
# What it raises, likewise, where it has compiled the function for as many layouts of arguments as it may.
TooManyLayouts = FailOnRecompileLimitHit
# What Inductor raises where it cannot compile a graph.
InductorError = torch._inductor.exc.InductorError

# Options of Inductor with which each new result has memory of its own. Else (2.11) it takes what is multiplied by ones,
# or added to zeros, for the factor itself: two results are one tensor, or one is an argument, which may be written in
# the same function.
OWN_MEMORY: dict[str, Any] = {"joint_graph_constant_folding": False}

# Inductor's operators for max pooling. The first returns the maxima, and as a byte the place of each in its window,
# counted row by row; the second makes PyTorch's indices of such places.
max_pool_with_places: Callable[..., Any] = torch.ops.prims._low_memory_max_pool_with_offsets
indices_of_places: Callable[..., torch.Tensor] = torch.ops.prims._low_memory_max_pool_offsets_to_indices


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Has Inductor write the tensor to memory. Else, each thread that reads an element computes it anew."""
    written: torch.Tensor = torch.ops.prims.inductor_force_stride_order(tensor, tensor.stride())
    return written


def free_layouts() -> AbstractContextManager[None]:
    """Inside, Inductor leaves the results of what it compiles in whatever layout it has them."""
    import torch._inductor.config as config  # it is slow to import

    return config.patch(keep_output_stride=False)


@contextmanager
def timing_kernels_in(place: Callable[[int], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, this thread has Inductor time kernels in ``place(nbytes)``: it allocates as much as the L2 cache there.

    What a kernel writes in place is copied first, in another ``place(nbytes)`` inside of that.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    thread, benchmark = threading.get_ident(), benchmarker.benchmark_gpu

    def benchmark_there(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return benchmark(*args, **kwargs)
        inductor: Any = importlib.import_module("torch._inductor.compile_fx")  # slow, but Inductor has done so
        copy = inductor.clone_preserve_strides

        def copy_there(tensor: torch.Tensor) -> torch.Tensor:
            with place(tensor.untyped_storage().nbytes()):
                return copy(tensor)

        cache_nbytes = getattr(benchmarker, "L2_cache_size", sys.maxsize)  # which Triton does not say
        with place(cache_nbytes), patch.object(inductor, "clone_preserve_strides", copy_there):
            return benchmark(*args, **kwargs)

    with patch.object(benchmarker, "benchmark_gpu", benchmark_there):
        yield


def call_compiled_through(call: Callable[[Callable[..., Any], Sequence[Any], str], Any]) -> bool:
    """Has ``call`` called in the place of each graph that Inductor has compiled, with the graph, its arguments and its
    source. Returns False if Inductor is not loaded, so that it has compiled none.
    """
    module: Any = sys.modules.get("torch._inductor.output_code")
    if module is None:
        return False
    graph = module.CompiledFxGraph
    if not hasattr(original := graph.__call__, "__wrapped__"):
        graph.__call__ = wraps(original)(lambda self, inputs: call(partial(original, self), inputs, self.source_code))
    return True


class _Donated(list[int]):
    """Positions of a graph's inputs that Inductor may write over."""


def compile_donating(function: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """The function, compiled so that it may write over its arguments of these names once it has read them.

    Inductor does so with what a forward has saved, if it compiles the backward, too.
    """

    def compile_graph(graph: Any, examples: Sequence[Any]) -> Any:
        inductor: Any = importlib.import_module("torch._inductor.compile_fx")  # slow to import
        places = graph.graph.find_nodes(op="placeholder")
        sources = [getattr(place.meta.get("grapharg"), "source", None) for place in places]
        donated = _Donated(i for i, source in enumerate(sources) if getattr(source, "local_name", None) in names)

        def compile_inner(module: Any, inputs: Sequence[Any], **options: Any) -> Any:
            facts = TracingContext.get().fw_metadata
            if facts is not None and len(inputs) == len(places):
                facts.bw_donated_idxs = donated
            return inductor.compile_fx_inner(module, inputs, **options)

        _have_inductor_see_donated()
        config: Any = torch.compiler.config
        with config.patch(cache_key_tag=f"donates {[*donated]}"):  # Inductor's caches do not know
            return inductor.compile_fx(graph, examples, inner_compile=compile_inner, config_patches=OWN_MEMORY)

    return torch.compile(function, backend=compile_graph, fullgraph=True, dynamic=False)


def _have_inductor_see_donated() -> None:
    """Inductor looks for donated inputs in a backward only."""
    lowering: Any = importlib.import_module("torch._inductor.graph").GraphLowering
    if hasattr(original := lowering.placeholder, "__wrapped__"):
        return

    @wraps(original)
    def placeholder(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.bw_donated_idxs, _Donated):
            return original(self, *args, **kwargs)
        with patch.object(self, "is_backward", True):
            return original(self, *args, **kwargs)

    lowering.placeholder = placeholder


def strides_of_results(function: Callable[..., Sequence[Any]], args: Sequence[Any]) -> list[Any]:
    """The strides of each tensor that the function returns for these arguments. Nothing is computed."""
    with disable_dispatch_modes(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        results = function(*tree_map_only(torch.Tensor, mode.from_tensor, args))
        return [result.stride() if isinstance(result, torch.Tensor) else None for result in results]


def dynamo_recompile_limit(limit: int) -> AbstractContextManager[None]:
    """Inside, Dynamo compiles a code object so many times. Compiled copies of a model share its code objects."""
    return torch._dynamo.config.patch(recompile_limit=limit)


def optimize_ddp(yes: bool) -> AbstractContextManager[None]:
    """Whether Dynamo, where it compiles inside, cuts a DDP module's graph at its buckets to overlap their reduction."""
    return torch._dynamo.config.patch(optimize_ddp=yes)


def stacks_of_generated_code(module: Any) -> dict[tuple[str, int], str]:
    """For each line of the code of a module's FX graphs, by file name and number: the stack that Dynamo saw there.

    A line assigns to a variable that has the name of its node. A placeholder has no line: its stack, which is that of
    its first use, is at its name and 0.
    """
    graphs = module.modules() if isinstance(module, torch.fx.GraphModule) else ()
    found: dict[tuple[str, int], str] = {}
    for graph in (each for each in graphs if isinstance(each, torch.fx.GraphModule)):
        file = type(graph).forward.__code__.co_filename
        stacks = {node.name: node.stack_trace for node in graph.graph.nodes}
        placeholders = (node.name for node in graph.graph.nodes if node.op == "placeholder")
        found |= {(name, 0): str(stacks[name]) for name in placeholders if stacks[name]}
        for number, line in enumerate(linecache.getlines(file), 1):
            assigned = re.match(r"\s*(\w+)(\s*:[^=]*)?\s*=", line)
            if assigned and (stack := stacks.get(assigned[1])):
                found[file, number] = str(stack)
    return found


def forget_dynamic_sizes() -> None:
    """Makes Dynamo forget which sizes varied: it compiles such sizes as dynamic ones from the start."""
    torch._dynamo.pgo.reset_code_state()


def keep_cublas_workspaces() -> AbstractContextManager[Any]:
    """Inside, Inductor frees no cuBLAS workspaces. Else it frees all when it records a graph, also those in use."""
    return patch.object(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, create=True)


@contextmanager
def before_dynamo_compiles(callback: Callable[[], None]) -> Iterator[None]:
    """Inside, ``callback`` is called before Dynamo compiles a frame."""

    def call(_: Any) -> None:
        callback()

    handler = torch._dynamo.callback.callback_handler
    handler.register_start_callback(call)
    try:
        yield
    finally:
        handler.remove_start_callback(call)


def is_compiled_by_dynamo(value: Any) -> bool:
    """Whether a function or a module is what ``torch.compile`` returns, or was compiled in place."""
    attributes = names_of(value)
    names = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")
    is_module = isinstance(value, torch.nn.Module)
    return any(attributes.get(name) is not None for name in names) or (is_module and "_orig_mod" in value._modules)


def function_before_dynamo(value: Any) -> Any:
    """What ``torch.compile`` was given to make a function; None for anything else."""
    original = names_of(value).get("_torchdynamo_orig_callable")
    if isinstance(original, types.FunctionType) and original.__code__ is _inlined:  # what was given is no function
        return (original.__closure__ or ())[0].cell_contents
    return original


_inlined = wrap_inline(len).__code__


def code_before_dynamo(code: types.CodeType) -> types.CodeType:
    """The code of a function whose code Dynamo has replaced; other code itself."""
    module: Any = sys.modules.get("torch._dynamo.convert_frame")
    return code if module is None else module.orig_code_map.get(code) or code


def is_restored_by_dynamo(frame: types.FrameType | None) -> bool:
    """Whether the function of PyTorch's that sets a generator in this frame gives it back what it had before Dynamo."""
    between = "torch.random", "torch.cuda", "torch._dynamo.eval_frame"  # the last keeps Dynamo out of manual_seed()
    while frame is not None and _module(frame).startswith(between):
        frame = frame.f_back
    return frame is not None and _module(frame).startswith("torch._dynamo")


def _module(frame: types.FrameType) -> str:
    return str(frame.f_globals.get("__name__"))
