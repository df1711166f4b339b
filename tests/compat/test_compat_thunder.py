"""What the package relies on of Thunder's internals."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import thunder
import torch
from torch import nn

from thunder_cg import cudagraph_transform
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.compiled import (
    OPTIONS,
    compile_data,
    compile_stats,
    dispatch_of,
    drop_self_reference,
    module_buffers,
    module_parameters,
    original_module,
    set_dispatch,
)


@pytest.fixture
def compiled() -> compat.ThunderModule:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    jmodule = thunder.jit(module)
    jmodule(torch.randn(4, 2))
    return jmodule


def test_a_compiled_module_tells_where_its_tensors_are(compiled: compat.ThunderModule) -> None:
    original = original_module(compiled)
    assert module_parameters(compiled).keys() == dict(original.named_parameters()).keys()
    assert module_buffers(compiled).keys() == dict(original.named_buffers()).keys()
    assert module_parameters(compiled)["0.weight"] is original[0].weight


def test_a_compiled_module_tells_what_was_compiled(compiled: compat.ThunderModule) -> None:
    statistics = compile_stats(compiled)
    (entry,) = statistics.interpreter_cache
    assert statistics.calls == 1 and statistics.last_prologue is entry.prologue_fn
    assert compile_data(compiled).cache_option is compat.CACHE_OPTIONS.CONSTANT_VALUES
    prims = {symbol.sym.id for symbol in entry.prologue_traces[0].bound_symbols}
    assert {compat.PrimIDs.UNPACK_PARAMETER, compat.PrimIDs.UNPACK_BUFFER} <= prims


def test_what_a_module_calls_can_be_replaced(compiled: compat.ThunderModule) -> None:
    before = dispatch_of(compiled)
    set_dispatch(compiled, lambda x: "replaced")
    assert compiled(torch.randn(4, 2)) == "replaced"
    set_dispatch(compiled, before)
    assert compiled(torch.randn(4, 2)).shape == (4, 3)


def test_a_trace_is_current_only_while_it_is_made() -> None:
    assert compat.current_trace() is None
    trace = compat.TraceCtx()
    with compat.tracectx(trace):
        assert compat.current_trace() is trace
    assert compat.current_trace() is None


def test_functions_of_a_symbol_are_replaced_in_a_copy() -> None:
    def one() -> int:
        return 1

    symbol = compat.Symbol("f", meta=None, is_fusion=True)
    bound = compat.BoundSymbol(symbol, (), {}, None, (), _call_ctx={"f": one})
    other = compat.rebind(bound, {"f": one, "g": one})
    assert compat.bound_functions(bound) == {"f": one} and compat.bound_functions(other).keys() == {"f", "g"}


def test_a_function_that_thunder_built_is_freed_without_the_collector() -> None:
    class Named:
        pass

    named = Named()
    source = "def f():\n  return named"
    function = compat.build_callable("f", python_str=source, file_name="f", ctx={"named": named})
    assert function() is named
    drop_self_reference(function)
    assert function() is named
    reference = weakref.ref(named)
    gc.disable()
    try:
        del function, named
        assert reference() is None
    finally:
        gc.enable()


def test_uneven_shards_are_padded_with_zeros() -> None:
    """Thunder leaves what it has allocated, which is NaN here. Once it does not, `pad_shards_with_zeros` can go."""
    cudagraph_transform()
    torch.use_deterministic_algorithms(True)  # which fills new memory
    try:
        shard = thunder.distributed._shard_tensor
        for ours, pads in ((shard.__wrapped__, torch.isnan), (shard, lambda tensor: tensor == 0)):
            shards = [ours(torch.ones(5, 2), rank, 4, "weight", allow_padding_for_fsdp=True)[0] for rank in range(4)]
            assert torch.cat(shards)[:5].eq(1).all() and pads(torch.cat(shards)[5:]).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_options_that_thunder_asks_for_are_known():
    sources = "".join(
        path.read_text() for path in Path(thunder.__file__).parent.rglob("*.py") if "test" not in str(path)
    )
    asked = re.findall(r"get_compile_option\(\s*[\"'](\w+)|compile_options\.(?:get|pop)\(\s*[\"'](\w+)", sources)
    assert {name for names in asked for name in names if name} <= OPTIONS and len(asked) > 20
