"""PyTorch's own wrappers of data parallelism around compiled modules, and inside what thunderfx compiles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import thunder
import torch
from ranks import Ranks
from thunder.dynamo import thunderfx
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from thunder_cg import explain
from thunder_cg.dynamo.compiler import compile_with
from thunder_cg.errors import ShardedModuleError
from thunder_cg.fastpath.accumulate import Accumulators
from thunder_cg.fastpath.training import BackwardGraph

PARAMETERS = 7  # of parallel.Model
nightly = pytest.mark.nightly
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


def with_power_sgd(graphs: list[Any]) -> Any:
    torch.manual_seed(0)  # of the matrices that it begins with
    wrapped = data_parallel(compile_model(graphs), gradient_as_bucket_view=True)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=1)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped


def used_before_ddp(graphs: list[Any]) -> Any:
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
    "PowerSGD": with_power_sgd,
    "used before": used_before_ddp,
}


def train_under_ddp(case: str, micro: int) -> tuple[int, int, list[Any], Any]:
    import parallel

    theirs = DDP[case]([])
    expected = parallel.train(theirs, STEPS, micro=micro)
    ours = DDP[case]([parallel.transform()])
    found = parallel.train(ours, STEPS, micro=micro)
    hooked = getattr(ours, "hooked", None)
    assert Counter(hooked or ()) == Counter(getattr(theirs, "hooked", ()))  # on GPUs, a thread calls them as they come
    last = [p.detach().cpu().tolist() for p in ours.parameters()]
    return parallel.differing(found, expected), parallel.summary(ours.module), last, hooked


@pytest.mark.parametrize(
    ("case", "micro"),
    [
        ("unused parameter", 1),
        pytest.param("bucket views", 3, marks=nightly),
        *(pytest.param(case, 1, marks=nightly) for case in DDP if case != "unused parameter"),
        pytest.param("plain", 3, marks=nightly),
    ],
)
def test_ddp_of_a_compiled_module(ranks: Ranks, case: str, micro: int) -> None:
    answers = ranks.run(train_under_ddp, case, micro)
    for differing, traces, _, hooked in answers:
        assert not differing
        assert [trace["kind"] for trace in traces] == ["forward", "backward"]
        for trace in traces:
            assert trace["regions"] == 1 and not trace["fallbacks"] and trace["eager_calls"] == 1
            assert trace["replays"][0] == trace["calls"] - 1 >= STEPS * micro - 1
        assert traces[0]["fast_path_calls"] >= STEPS * micro - 3
        assert hooked is None or len(hooked) == STEPS * PARAMETERS
    assert answers[0][2] == answers[1][2]  # the ranks' parameters


def train_with_uneven_inputs() -> tuple[int, list[Any]]:
    """Rank 1 has three more batches, in which DDP's ``join`` has rank 0 communicate as if it had them, too."""
    import parallel

    found: list[list[torch.Tensor]] = []
    for graphs in ([], [parallel.transform()]):
        wrapped = data_parallel(compile_model(graphs))
        optimizer, values = torch.optim.SGD(wrapped.parameters(), lr=0.1), []
        with wrapped.join():
            for step in range(STEPS + 3 * parallel.RANK()):
                optimizer.zero_grad()
                loss = wrapped(parallel.tokens(step)).square().mean()
                loss.backward()
                optimizer.step()
                values += [loss.detach().clone(), *(p.detach().clone() for p in wrapped.parameters())]
        found.append(values)
    return parallel.differing(*found), [trace["replays"] for trace in parallel.summary(wrapped.module)]


@nightly
def test_ddp_with_uneven_inputs(ranks: Ranks) -> None:
    first, second = ranks.run(train_with_uneven_inputs)
    assert first == (0, [[STEPS - 1]] * 2) and second == (0, [[STEPS + 2]] * 2)


def train_under_fsdp() -> tuple[int, list[Any]]:
    import parallel

    found, where = [], parallel.device()
    for graphs in ([], [parallel.transform()]):
        wrapped = FullyShardedDataParallel(compile_model(graphs), device_id=where, use_orig_params=True)
        found.append(parallel.train(wrapped, STEPS))
    return parallel.differing(*found), [trace["replays"] for trace in parallel.summary(wrapped.module)]


@nightly
def test_fsdp_of_a_compiled_module(ranks: Ranks) -> None:
    """It shards the parameters that Thunder has, unlike fully_shard."""
    for differing, replays in ranks.run(train_under_fsdp):
        assert not differing
        assert ranks.device == "cuda" or replays == [[STEPS - 1]] * 2  # on a GPU, it gives them other memory


def deliveries(case: str) -> tuple[int, list[bool], list[bool]]:
    """How many values differ; of each step, whether gradients went in bulk, and whether all are what a replay made."""
    import parallel

    taken: list[bool] = []
    replayed: set[int] = set()
    deliver, replay = Accumulators.deliver, BackwardGraph.replay

    def watched_deliver(self: Accumulators, gradients: Any, others: Any) -> Any:
        rest = deliver(self, gradients, others)
        taken.append(rest is not gradients)
        return rest

    def watched_replay(self: BackwardGraph, tensors: list[Any]) -> list[Any]:
        results = replay(self, tensors)
        replayed.update(t.data_ptr() for t in results if t is not None)
        return results

    theirs, ours = DDP[case]([]), DDP[case]([parallel.transform()])
    expected = parallel.train(theirs, STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accumulators, "deliver", watched_deliver)
        patch.setattr(BackwardGraph, "replay", watched_replay)
        found = parallel.train(ours, STEPS)
        are_replayed = [p.grad.data_ptr() in replayed for p in ours.parameters()]
    return parallel.differing(found, expected), taken, are_replayed


@pytest.mark.parametrize("case", ["plain", "used before"])
@pytest.mark.nightly
def test_gradients_under_ddp(ranks: Ranks, case: str) -> None:
    """What a replay makes becomes the gradient without a copy. It goes in bulk if the nodes were made before DDP was:
    DDP's hooks run after each node all the same."""
    for differing, taken, are_replayed in ranks.run(deliveries, case):
        assert not differing
        assert set(taken) == {case == "used before"} and len(taken) >= STEPS - 2
        assert len(are_replayed) == PARAMETERS and all(are_replayed)


def train_on_streams(used_before: bool) -> int:
    """Forward and backward are called on streams that change, each behind work that takes long.

    Plain Thunder runs on one stream: on several, autograd reads its gradients before they are made.
    """
    import parallel

    def losses_and_gradients(graphs: list[Any], several: bool) -> list[torch.Tensor]:
        wrapped = used_before_ddp(graphs) if used_before else data_parallel(compile_model(graphs))
        found, kept = [], []
        busy = torch.ones(4096, 4096, device=parallel.device())
        streams = [torch.cuda.Stream() if several and i else torch.cuda.current_stream() for i in range(3)]
        for step in range(3 * STEPS):
            wrapped.zero_grad(set_to_none=True)
            forward, backward = streams[step % 3], streams[step // 3 % 3]
            forward.wait_stream(streams[0])
            with torch.cuda.stream(forward):
                busy @ busy
                loss = wrapped(parallel.tokens(step)).square().mean()
            backward.wait_stream(forward)
            with torch.cuda.stream(backward):
                loss.backward()
                found += [loss.detach().clone(), *(p.grad.clone() for p in wrapped.parameters())]
            streams[0].wait_stream(backward)
            kept.append(loss)
        return found

    expected = losses_and_gradients([], several=False)
    return parallel.differing(losses_and_gradients([parallel.transform()], several=True), expected)


@pytest.mark.parametrize("used_before", [False, True])
def test_ddp_on_changing_streams(ranks: Ranks, used_before: bool) -> None:
    """DDP reduces a gradient only after the replay that makes it, whatever streams forward and backward are on."""
    if ranks.device == "cpu":
        pytest.skip("a CPU has no streams")
    assert ranks.run(train_on_streams, used_before) == [0, 0]


def fx_of_ddp(graphs: list[Any]) -> tuple[Any, Any]:
    import parallel

    wrapped = data_parallel(parallel.model())
    return thunderfx(wrapped, transforms=graphs), wrapped


def fx_of_fsdp2(graphs: list[Any], *, blocks: bool) -> tuple[Any, Any]:
    import parallel

    model = parallel.model()
    for block in (model.block,) if blocks else ():
        fully_shard(block)
    fully_shard(model)
    return thunderfx(model, transforms=graphs), model


FX: dict[str, Callable[[list[Any]], tuple[Any, Any]]] = {
    "DDP": fx_of_ddp,
    "FSDP2": lambda graphs: fx_of_fsdp2(graphs, blocks=False),
    "FSDP2, blocks": lambda graphs: fx_of_fsdp2(graphs, blocks=True),
}


def local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train_fx(case: str, graphs: list[Any], steps: int) -> tuple[list[torch.Tensor], Any]:
    """Losses, gradients and parameters of all steps of the usual loop, which keeps the loss."""
    import parallel

    torch._dynamo.reset()
    compiled, model = FX[case](graphs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = compiled(parallel.tokens(step)).square().mean()
        loss.backward()
        found += [loss.detach().clone(), *(local(p.grad) for p in model.parameters())]
        optimizer.step()
        found += [local(p) for p in model.parameters()]
    return found, compiled


def same_bits_with_thunderfx(case: str, steps: int) -> tuple[int, list[Any]]:
    import parallel

    theirs, _ = train_fx(case, [], steps)
    ours, compiled = train_fx(case, [parallel.transform()], steps)
    return parallel.differing(ours, theirs), [t for t in parallel.summary(compiled) if t["regions"]]


@pytest.mark.nightly
@pytest.mark.parametrize("case", FX)
def test_thunderfx(ranks: Ranks, case: str) -> None:
    """FSDP2 gives parameters new memory in each step: they are copied, after a bounded number of captures."""
    for differing, traces in ranks.run(same_bits_with_thunderfx, case, 20, timeout=200):
        assert not differing and len(traces) == (4 if "blocks" in case else 2)
        for trace in traces:
            assert trace["eager_calls"] <= 2 and not trace["fallbacks"]
            assert trace["replays"][0] == trace["calls"] - trace["eager_calls"]
            assert trace["captures"][0] <= (8 if "FSDP2" in case else 1)
        assert traces[0]["fast_path_calls"] >= traces[0]["calls"] / 2


FSDP2: dict[str, dict[str, Any]] = {
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "gathered until the backward": {"reshard_after_forward": False},
    "resharded to so many ranks": {"reshard_after_forward": 2},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "accumulates": {},
    "checkpoint": {},
}


def train_fsdp2(case: str, folder: str, graphs: list[Any], steps: int) -> tuple[list[torch.Tensor], Any]:
    """A module with a part that is sharded by itself. Losses, norms of gradients, gradients and parameters."""
    import parallel

    torch._dynamo.reset()
    model = parallel.model()
    for module in (model.block, model):
        fully_shard(module, **FSDP2[case])
    compiled = thunderfx(model, transforms=graphs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        for last in (False, True) if case == "accumulates" else (True,):
            model.set_requires_gradient_sync(last)
            loss = compiled(parallel.tokens(2 * step + last)).float().square().mean()
            loss.backward()
        found += [loss.detach().clone(), local(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))]
        found += [local(p.grad) for p in model.parameters()]
        optimizer.step()
        found += [local(p) for p in model.parameters()]
        if case == "checkpoint" and step == steps // 2:
            checkpoint.save(dict(zip("mo", get_state_dict(model, optimizer))), checkpoint_id=folder)
            compiled(parallel.tokens(99)).square().mean().backward()
            optimizer.step()
            checkpoint.load(state := dict(zip("mo", get_state_dict(model, optimizer))), checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
    return found, compiled


def same_bits_with_fsdp2(case: str, folder: str, steps: int) -> tuple[int, list[Any]]:
    import parallel

    theirs, _ = train_fsdp2(case, f"{folder}/theirs", [], steps)
    ours, compiled = train_fsdp2(case, f"{folder}/ours", [parallel.transform()], steps)
    return parallel.differing(ours, theirs), [trace for trace in parallel.summary(compiled) if trace["regions"]]


@nightly
@pytest.mark.parametrize("case", FSDP2)
def test_fsdp2_under_thunderfx(ranks: Ranks, case: str, tmp_path: Path) -> None:
    if case == "offloaded" and ranks.device == "cuda":
        pytest.skip("NCCL sums no norms of gradients on the CPU")
    for differing, traces in ranks.run(same_bits_with_fsdp2, case, str(tmp_path), 14, timeout=200):
        assert not differing and traces
        assert all(trace["replays"] and min(trace["replays"]) >= 10 for trace in traces)


class LoopOverLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loop_over_sharded_layers(is_ours: bool) -> str:
    import parallel

    torch._dynamo.reset()
    model = LoopOverLayers().to(parallel.device())
    for layer in (*model.layers, model):
        fully_shard(layer)
    compiled = (compile_with if is_ours else thunderfx)(model, transforms=[parallel.transform()])
    for _ in range(3):
        compiled(torch.ones(2, 8, device=parallel.device()))
    return str(explain(compiled))


@pytest.mark.parametrize(("is_ours", "calls"), [(True, "3 calls"), (False, "Its calls")])
def test_a_loop_over_sharded_layers(ranks: Ranks, is_ours: bool, calls: str) -> None:
    """Dynamo compiles nothing then, if the layers are of torch.nn, and the report says what to do instead."""
    for text in ranks.run(loop_over_sharded_layers, is_ours):
        assert text.startswith(f"Nothing is compiled. {calls} ran in plain Python, without Thunder.\n"), text
        assert re.search(r"test_torch_wrappers.py:\d+: def forward.*\n.*hooks of fully_shard, .* in a loop", text), text
        assert "put a sharded layer of torch.nn, such as nn.Sequential, into a module of your own" in text, text


class ReducesInPlace(torch.nn.Module):
    """Two parts, and between them a reduction that the user's code does in place."""

    def __init__(self) -> None:
        super().__init__()
        import parallel

        torch.manual_seed(0)
        self.first, self.second = (parallel.Block(8).to(parallel.device()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        torch.distributed.all_reduce(y)
        return self.second(y) + y


def reduce_in_place(name: str, steps: int, capture: str) -> tuple[int, list[Any]]:
    import parallel

    compiler = {"jit": thunder.jit, "thunderfx": thunderfx}[name]
    torch._dynamo.reset()
    graphs = [parallel.transform(capture_collectives=capture)]
    theirs, ours = (compiler(ReducesInPlace(), transforms=each) for each in ([], graphs))
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(s + parallel.RANK())) for s in range(steps)]
    with torch.no_grad():
        expected = [theirs(batch.to(parallel.device())) for batch in batches]
        found = [ours(batch.to(parallel.device())) for batch in batches]
    return parallel.differing(found, expected), parallel.summary(ours)


@pytest.mark.parametrize(
    ("compiler", "capture"),
    [("jit", "auto"), pytest.param("jit", "never", marks=nightly), pytest.param("thunderfx", "auto", marks=nightly)],
)
def test_reduction_in_place(ranks: Ranks, compiler: str, capture: str) -> None:
    """Thunder does not differentiate the reduction."""
    for differing, traces in ranks.run(reduce_in_place, compiler, 8, capture):
        assert not differing
        assert traces[0]["regions"] == (1 if capture == "auto" else 2) == len(traces[0]["replays"])
        assert traces[0]["eager_calls"] == 1 and not traces[0]["fallbacks"]
        assert set(traces[0]["replays"]) == {7} and set(traces[0]["captures"]) == {1}


def refused(sharded: str, calls: int, grad: bool) -> tuple[list[str], int]:
    """The messages of two calls after ``fully_shard``, which follows so many calls; how many calls Thunder counted."""
    import parallel

    model = parallel.model()
    if sharded == "model":
        fully_shard(model)
    compiled = thunder.jit(model, transforms=[parallel.transform()])
    around = torch.nn.Sequential(compiled, torch.nn.LayerNorm(parallel.WIDTH, device=parallel.device()))
    messages = []
    with torch.set_grad_enabled(grad):
        for step in range(calls):
            compiled(parallel.tokens(step))
        if sharded != "model":
            fully_shard({"compiled": compiled, "part": model.block, "around": around}[sharded])
        for _ in range(2):
            with pytest.raises(ShardedModuleError) as caught:
                (around if sharded == "around" else compiled)(parallel.tokens(0))
            messages.append(str(caught.value))
    return messages, thunder.compile_stats(compiled).calls


@pytest.mark.parametrize(
    ("sharded", "calls", "grad"),
    [
        ("model", 0, True),
        ("compiled", 0, True),
        ("compiled", 5, True),
        ("compiled", 5, False),
        ("part", 5, True),
        ("around", 0, True),
        ("around", 5, False),
    ],
)
@pytest.mark.nightly_after(3)
def test_fully_shard_with_a_compiled_module_is_refused(ranks: Ranks, sharded: str, calls: int, grad: bool) -> None:
    """Each rank would train alone, also after calls that took the fast path; so do modules in it and around it."""
    for messages, counted in ranks.run(refused, sharded, calls, grad):
        assert counted == calls and messages[0] == messages[1]
        assert "each rank would train alone" in messages[0] and "thunder.distributed.fsdp" in messages[0]


class OnDTensors(torch.nn.Module):
    """A linear layer with a sharded weight, a redistribution, and operators on plain tensors before and after."""

    def __init__(self) -> None:
        super().__init__()
        import parallel

        torch.manual_seed(0)
        self.mesh = init_device_mesh(parallel.device().type, (torch.distributed.get_world_size(),))
        weight = torch.randn(8, 8, device=parallel.device())
        self.weight = torch.nn.Parameter(distribute_tensor(weight, self.mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x * 2) + 1
        y = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        z = torch.nn.functional.linear(y, self.weight)
        z = (z + z).redistribute(self.mesh, [Replicate()]).to_local()
        return torch.tanh(z * 2) + 1


def infer(compiled: list[Any], calls: list[Callable[..., Any]], steps: int) -> tuple[int, list[Any], dict[str, str]]:
    """How many results differ, what ran, and why operators stayed eager."""
    import parallel

    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(s)) for s in range(steps)]
    with torch.no_grad():
        expected, found = ([local(call(batch.to(parallel.device()))) for batch in batches] for call in calls)
    ops = [op for trace in explain(compiled[1]).to_dict()["traces"] for op in trace["ops"] if op["verdict"] == "eager"]
    reasons = {op["name"]: op["reason"] for op in ops}
    return parallel.differing(found, expected), parallel.summary(compiled[1]), reasons


def infer_with_dtensors_inside(steps: int) -> tuple[int, list[Any], dict[str, str]]:
    import parallel

    torch._dynamo.reset()
    compiled = [thunderfx(OnDTensors(), transforms=graphs) for graphs in ([], [parallel.transform()])]
    return infer(compiled, compiled, steps)


@pytest.mark.nightly
def test_dtensors_inside(ranks: Ranks) -> None:
    """Graphs form before and after what works on DTensors. Thunder leaves the redistribution to torch.compile."""
    for differing, traces, reasons in ranks.run(infer_with_dtensors_inside, 8):
        assert not differing
        assert [trace["replays"] for trace in traces] == [[7], [], [7]]
        assert reasons.keys() == {"dtensor_from_local", "dtensor_add_prim", "dtensor_to_local"}
        assert all("works on DTensors" in reason for reason in reasons.values())


def infer_with_dtensors(steps: int) -> tuple[int, list[Any], dict[str, str]]:
    import parallel

    weight, copies = OnDTensors().weight.detach(), [Replicate()]
    mesh = weight.device_mesh

    def redistribute(x: DTensor, w: DTensor) -> DTensor:
        y = torch.exp(torch.nn.functional.linear(x, w))
        return DTensor.redistribute(y + y, mesh, copies)

    compiled = [thunder.jit(redistribute, transforms=graphs) for graphs in ([], [parallel.transform()])]
    calls = [lambda x, f=f: f(DTensor.from_local(x, mesh, copies), weight) for f in compiled]
    return infer(compiled, calls, steps)


def test_dtensors(ranks: Ranks) -> None:
    """Only what communicates whatever the layouts are is called a collective."""
    for differing, traces, reasons in ranks.run(infer_with_dtensors, 8):
        assert not differing and traces[0]["regions"] == 0
        assert "communicates" in reasons.pop("dtensor_redistribute")
        assert reasons.keys() == {"dtensor_linear_prim", "dtensor_exp_prim", "dtensor_add_prim"}
        assert all("works on DTensors" in reason for reason in reasons.values())


def train_parallelized(steps: int) -> tuple[int, list[Any], dict[str, str]]:
    """Inductor's pieces run as they are, since it takes seconds to compile them."""
    import parallel

    mesh = init_device_mesh(parallel.device().type, (torch.distributed.get_world_size(),))
    plan = {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
    found: list[list[torch.Tensor]] = []
    for graphs in ([], [parallel.transform()]):
        torch._dynamo.reset()
        model = parallelize_module(parallel.model(), mesh, plan)
        compiled = compile_with(model, transforms=graphs)
        found.append([])
        with mock.patch.object(torch._inductor, "compile", lambda module, *inputs, **options: module):
            for step in range(steps):
                model.zero_grad()
                loss = compiled(parallel.tokens(step, shared=True)).square().mean()
                loss.backward()
                found[-1] += [loss.detach(), *(local(p.grad) for p in model.parameters())]
    outside = {each.operator: each.reason for each in explain(compiled).outside}
    return parallel.differing(*found), parallel.summary(compiled), outside


@nightly
def test_parallelized_modules_train(ranks: Ranks) -> None:
    """Thunder has no gradient of what makes DTensors, so Inductor gets all that works on them."""
    for differing, traces, outside in ranks.run(train_parallelized, 4):
        assert not differing
        assert [trace["replays"] for trace in traces][2:4] == [[3], [3]]  # between the two linear layers
        assert outside.keys() == {"DTensor.from_local", "linear", "DTensor.redistribute", "DTensor.to_local"}
        assert all("works on DTensors, of which Thunder knows no gradient" in reason for reason in outside.values())
