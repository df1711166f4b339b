"""PyTorch's own wrappers of data parallelism around compiled modules, and inside what thunderfx compiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import thunder
import torch
from ranks import Ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


def data_parallel(compiled: Any, **options: Any) -> DistributedDataParallel:
    import parallel

    ids = [parallel.device().index] if parallel.device().type == "cuda" else None
    return DistributedDataParallel(compiled, device_ids=ids, **options)


def compile_model(graphs: list[Any]) -> Any:
    import parallel

    return thunder.jit(parallel.model(), transforms=graphs)


def with_unused_parameter(graphs: list[Any]) -> Any:
    import parallel

    model = parallel.model()
    model.unused = torch.nn.Linear(4, 4, device=parallel.device())
    return data_parallel(thunder.jit(model, transforms=graphs), find_unused_parameters=True)


def with_parameter_hooks(graphs: list[Any]) -> Any:
    """The hooks double each gradient before its reduction, and note each parameter that has one after it."""
    wrapped = data_parallel(compile_model(graphs))
    wrapped.hooked = []
    for parameter in wrapped.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(lambda p: wrapped.hooked.append(tuple(p.shape)))
    return wrapped


def with_communication_hook(graphs: list[Any]) -> Any:
    wrapped = data_parallel(compile_model(graphs))
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def used_before(graphs: list[Any]) -> Any:
    """The module was trained alone before, on the same batches on all ranks."""
    import parallel

    compiled = compile_model(graphs)
    for step in range(6):
        compiled.zero_grad(set_to_none=True)
        compiled(parallel.tokens(step, shared=True)).square().mean().backward()
    compiled.zero_grad(set_to_none=True)
    return data_parallel(compiled)


DDP: dict[str, Callable[[list[Any]], Any]] = {
    "plain": lambda graphs: data_parallel(compile_model(graphs)),
    "bucket views": lambda graphs: data_parallel(compile_model(graphs), gradient_as_bucket_view=True),
    "static graph": lambda graphs: data_parallel(compile_model(graphs), static_graph=True),
    "unused parameter": with_unused_parameter,
    "parameter hooks": with_parameter_hooks,
    "communication hook": with_communication_hook,
    "used before": used_before,
}


def train_under_ddp(case: str, micro: int) -> tuple[int, int, list[Any], Any]:
    import parallel

    theirs = DDP[case]([])
    expected = parallel.train(theirs, STEPS, micro=micro)
    ours = DDP[case]([parallel.transform()])
    found = parallel.train(ours, STEPS, micro=micro)
    hooked = getattr(ours, "hooked", None)
    assert hooked == getattr(theirs, "hooked", None)
    last = [p.detach().cpu().tolist() for p in ours.parameters()]
    return parallel.differing(found, expected), parallel.summary(ours.module), last, hooked


@pytest.mark.parametrize("case,micro", [*((case, 1) for case in DDP), ("plain", 3), ("bucket views", 3)])
def test_ddp_of_a_compiled_module(ranks: Ranks, case: str, micro: int) -> None:
    answers = ranks.run(train_under_ddp, case, micro)
    for differing, traces, _, hooked in answers:
        assert not differing
        assert [trace["kind"] for trace in traces] == ["forward", "backward"]
        for trace in traces:
            assert trace["regions"] == 1 and not trace["fallbacks"] and trace["eager_calls"] == 1
            assert trace["replays"][0] == trace["calls"] - 1 >= STEPS * micro - 1
        assert traces[0]["fast_path_calls"] >= STEPS * micro - 3
        assert hooked is None or len(hooked) == STEPS * 11
    assert answers[0][2] == answers[1][2]  # the ranks' parameters
