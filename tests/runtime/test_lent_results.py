"""Large results of inference that callers get where the graph wrote them. On CUDA, one has 16 MB, and a segment."""

from __future__ import annotations

import gc
from threading import Event, Thread
from unittest.mock import Mock

import pytest
import torch
from support import programs, replays, same, twice
from torch import nn

from thunder_cg import cudagraph_transform, release
from thunder_cg.analysis import segments
from thunder_cg.runtime.cuda.pool import CudaLoan
from thunder_cg.runtime.pair import Pair
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.region_capture import RegionCapture

WIDTH = {"cpu": 16, "cuda": 1024}  # inputs of 4 * WIDTH rows


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setattr(segments, "_LEAST_ALONE", 1)


@pytest.fixture
def width(device):
    return WIDTH[device]


def layers(width, device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(device)


@pytest.fixture
def pair(backend, device, width):
    """A model, plain and with graphs, in inference."""
    model = layers(width, device)
    with torch.no_grad():
        yield twice(model.requires_grad_(False), cudagraph_transform(backend=backend))


def batch(device, i, rows=4):
    width = WIDTH[device]
    return torch.randn(rows * width, width, generator=torch.Generator().manual_seed(i)).to(device)


def forward_of(model) -> Program:
    (forward,) = (program for program in programs(model) if program.kind == "forward")
    return forward


def captures(model):
    return sum(stats.captures for stats in forward_of(model).counts.stats)


def is_lent(model):
    """Whether the graph captured last copies nothing out."""
    return forward_of(model).pair.recordings[0].forward.graphs[0].nbytes_out == 0


def test_results_that_are_dropped_have_one_place(device, pair):
    plain, graphed = pair
    places = set()
    for i in range(6):
        y = graphed(batch(device, i))
        same(plain(batch(device, i)), y)
        if i:
            places.add(y.data_ptr())
        del y
    assert len(places) == 1 and is_lent(graphed) and captures(graphed) == 1 and replays(graphed) == 5


def test_a_result_that_is_held_while_the_next_one_is_made(device, pair):
    """As in ``y = model(x)``: two graphs take turns."""
    plain, graphed = pair
    y = last = None
    for i in range(8):
        before = y
        y = graphed(batch(device, i))
        same(plain(batch(device, i)), y)
        if before is not None:
            same(last, before)
            assert y.data_ptr() != before.data_ptr()
        last = plain(batch(device, i))
        del before
    assert is_lent(graphed) and captures(graphed) == 2 and replays(graphed) == 7


HOLD = {
    "result": lambda y: (y, y),
    "view": lambda y: (y[1:3], y[1:3]),
    "transposed": lambda y: (y.t(), y.t()),
    "storage": lambda y: (y.untyped_storage(), y),
    "through DLPack": lambda y: (torch.utils.dlpack.to_dlpack(y), y),
}


@pytest.mark.parametrize("hold", HOLD.values(), ids=HOLD)
def test_results_that_are_all_held_are_copied(device, pair, hold):
    plain, graphed = pair
    held, wanted = [], []
    for i in range(6):
        kept, y = hold(graphed(batch(device, i)))
        wanted.append(hold(plain(batch(device, i)))[1])
        held.append((kept, y.shape, y.stride(), y.storage_offset()))
        del kept, y
    for want, (kept, *layout) in zip(wanted, held):
        if isinstance(kept, torch.UntypedStorage):
            kept = torch.empty(0, device=device).set_(kept, layout[2], *layout[:2])
        elif not isinstance(kept, torch.Tensor):
            kept = torch.utils.dlpack.from_dlpack(kept)
        same(want, kept)
    assert not is_lent(graphed) and captures(graphed) == 3
    assert any("large results are copied out" in (p.counts.remark or "") for p in programs(graphed))


def test_callers_may_write_to_a_result(device, pair):
    plain, graphed = pair
    for i in range(6):
        y = graphed(batch(device, i))
        same(plain(batch(device, i)), y)
        y.fill_(float("nan"))
        del y
    assert is_lent(graphed) and captures(graphed) == 1


def test_a_result_in_a_cycle_of_references(device, pair):
    plain, graphed = pair
    gc.disable()
    try:
        for i in range(6):
            y = graphed(batch(device, i))
            same(plain(batch(device, i)), y)
            cycle = [y]
            cycle.append(cycle)
            del y, cycle
    finally:
        gc.enable()
    assert not is_lent(graphed)


def test_a_result_outlives_the_model(backend, device, width):
    model = layers(width, device).requires_grad_(False)
    graphed = twice(model, cudagraph_transform(backend=backend))[1]
    with torch.no_grad():
        for i in range(4):
            y = graphed(batch(device, i))
        want = model(batch(device, 3))
    del graphed
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    others = [torch.full_like(y, 7.0) for _ in range(4)]
    same(want, y)
    assert all((other == 7.0).all() for other in others)


def test_released_while_a_result_is_held(device, pair):
    plain, graphed = pair
    for i in range(3):
        y = graphed(batch(device, i))
    release(graphed)
    for i in range(3, 7):
        same(plain(batch(device, i)), graphed(batch(device, i)))
    same(plain(batch(device, 2)), y)


def test_captured_again_while_nobody_holds_a_result(device, pair):
    plain, graphed = pair
    for i in range(12):
        if i % 4 == 0:
            release(graphed)
        same(plain(batch(device, i)), graphed(batch(device, i)))
    assert is_lent(graphed) and captures(graphed) == 3
    release(graphed)
    for i in range(3):
        same(plain(batch(device, i)), graphed(batch(device, i)))
    assert is_lent(graphed)


@pytest.mark.parametrize("others_first", [False, True])
def test_shapes_that_share_an_arena(device, pair, others_first):
    """A graph runs beside a held result of another shape if it does not write there."""
    plain, graphed = pair
    y, want = None, None
    for i, rows in enumerate([4, 6, 4, 6, 6, 4, 4, 6, 4, 6, 6, 4, 6, 4, 4]):
        rows = 10 - rows if others_first else rows
        z = graphed(batch(device, i, rows))
        same(plain(batch(device, i, rows)), z)
        if y is not None:
            same(want, y)
        y, want = z, plain(batch(device, i, rows))
    assert replays(graphed) >= 10


def test_two_functions_of_one_transform(backend, device, width):
    """One trains beside a held result of the other, in memory of its own."""
    transform = cudagraph_transform(backend=backend)
    shows, trains = layers(width, device), layers(width, device)
    (plain, graphed), (plain_trains, graphed_trains) = twice(shows, transform), twice(trains, transform)
    held = []
    for i in range(8):
        with torch.no_grad():
            y = graphed(batch(device, i))
            want = plain(batch(device, i))
        held = [(want, y)] if i % 2 else []
        for model in (plain_trains, graphed_trains):
            model.zero_grad(set_to_none=True)
            model(batch(device, i)).square().mean().backward()
        same(*([p.grad for p in model.parameters()] for model in (plain_trains, graphed_trains)))
        same([want for want, _ in held], [y for _, y in held])
    assert replays(graphed_trains) >= 8 and is_lent(graphed)


def test_the_result_of_a_warm_up_is_held(device, pair):
    """Its memory may be what graphs write that were captured before."""
    plain, graphed = pair
    for i in range(3):
        z = graphed(batch(device, i, 6))
    y, want = graphed(batch(device, 3)), plain(batch(device, 3))
    (arena,) = {arena for program in programs(graphed) for arena in program.pair.arenas()}
    assert arena.try_hold()
    places = {at for at, _ in arena.places_on_loan()}
    arena.release()
    assert z.data_ptr() in places and (y.data_ptr() in places or device == "cuda")  # where it may have been copied
    del z
    for i in range(4, 8):
        same(plain(batch(device, i, 6)), graphed(batch(device, i, 6)))
        same(want, y)


@pytest.mark.parametrize("begins", ["in training", "in inference"])
def test_a_held_result_of_an_evaluation_takes_no_second_arena_for_training(backend, device, width, begins):
    plain, graphed = twice(layers(width, device), cudagraph_transform(backend=backend))
    y = want = None
    for i in range(3 + (begins == "in inference")):
        if i or begins == "in training":
            for j in range(4):
                for model in (plain, graphed):
                    model.zero_grad(set_to_none=True)
                    model(batch(device, j)).square().mean().backward()
                same(*([p.grad for p in model.parameters()] for model in (plain, graphed)))
                if y is not None:
                    same(want, y)
        with torch.no_grad():
            for j in range(4):
                y, want = graphed(batch(device, j)), plain(batch(device, j))
                same(want, y)
            if not i and begins == "in inference":
                y = None
    arenas = {arena for program in programs(graphed) for arena in program.pair.arenas()}
    assert len(arenas) == 1


def test_a_result_that_is_dropped_while_another_graph_is_captured(device, pair, monkeypatch):
    """Another thread may, or the garbage collector. The graph may write there."""
    plain, graphed = pair
    for i in range(3):
        graphed(batch(device, i, 6))
    graphed(batch(device, 3))
    held = [graphed(batch(device, 4, 6))]
    capture, place = RegionCapture.run, held[0].data_ptr()

    def run(self, **options):
        held.clear()
        return capture(self, **options)

    monkeypatch.setattr(RegionCapture, "run", run)
    same(plain(batch(device, 5)), graphed(batch(device, 5)))
    spared = [each.forward.spared for program in programs(graphed) for each in program.pair.recordings]
    assert not held and len(spared) == 2
    assert place not in {at for places in spared for at, _ in places}


def test_a_function_with_small_results_beside_a_held_one(backend, device, width, monkeypatch):
    transform = cudagraph_transform(backend=backend)
    (plain, graphed) = twice(layers(width, device).requires_grad_(False), transform)
    (plain_sum, graphed_sum) = twice(lambda x: x.sum(-1).sum(-1) * 2.0, transform)
    if device == "cpu":
        monkeypatch.setattr(segments, "_LEAST_ALONE", 4096)
    with torch.no_grad():
        for i in range(12):
            y, want = graphed(batch(device, i)), plain(batch(device, i))
            same(plain_sum(want), graphed_sum(y))
            same(want, y)
    assert is_lent(graphed) and captures(graphed) == 2 and captures(graphed_sum) <= 3


def test_results_in_ever_more_places_beside_another_function(backend, device, width, monkeypatch):
    """It is captured a few times only, and then in memory of which nobody has results."""
    transform = cudagraph_transform(backend=backend)
    (plain, graphed) = twice(layers(width, device).requires_grad_(False), transform)
    (plain_other, other) = twice(lambda x: (x.sum(0) * 2.0).sum(), transform)
    if device == "cpu":
        monkeypatch.setattr(segments, "_LEAST_ALONE", 4096)
    monkeypatch.setattr(Pair, "note_places", lambda *args: None)  # as if earlier graphs might write to each place
    x = batch(device, 0)
    with torch.no_grad():
        for i in range(5):
            for rows in range(4, 16):
                y, want = graphed(batch(device, i, rows)), plain(batch(device, i, rows))
                same(plain_other(x), other(x))
                same(want, y)
    assert captures(other) <= 6 and replays(other) >= 45


def test_memory_of_a_result_that_somebody_else_has(backend, device, width, monkeypatch):
    """Such as what a forward saved for later captures. The next call captures a graph with its results elsewhere."""
    plain, graphed = twice(
        layers(width, device).requires_grad_(False), cudagraph_transform(backend=backend, strict=True)
    )
    with torch.no_grad():
        for i in range(4):
            same(plain(batch(device, i)), graphed(batch(device, i)))
        (lent,) = forward_of(graphed).pair.recordings[0].forward.graphs[0].lent_results
        monkeypatch.setattr(lent.loan, "take", lambda: None)
        for i in range(4, 8):
            same(plain(batch(device, i)), graphed(batch(device, i)))
    assert is_lent(graphed) and captures(graphed) == 2 and sum(forward_of(graphed).counts.fallbacks.values()) == 1


def test_an_error_while_the_places_are_found(device, pair, monkeypatch):
    """Such as an interrupt: the arena is free afterwards."""
    plain, graphed = pair
    for i in range(3):
        y = graphed(batch(device, i))
    (arena,) = {arena for program in programs(graphed) for arena in program.pair.arenas()}
    with monkeypatch.context() as patch:
        patch.setattr(type(arena.on_loan[0]), "is_held", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            graphed(batch(device, 3))
    assert not arena.is_held()
    same(plain(batch(device, 2)), y)
    same(plain(batch(device, 4)), graphed(batch(device, 4)))


def test_another_thread_has_the_result(device, pair):
    """It is neither moved nor written while that thread has it."""
    plain, graphed = pair
    for i in range(3):
        graphed(batch(device, i))
    got, may_read, found = [graphed(batch(device, 3))], Event(), []
    want = plain(batch(device, 3))

    def read():
        with torch.no_grad():
            y = got.pop()
            at = y.data_ptr()
            may_read.wait(60)
            found.append((torch.equal(y, want), y.data_ptr() == at))

    thread = Thread(target=read)
    thread.start()
    while got:
        pass
    for i in range(4, 8):
        same(plain(batch(device, i)), graphed(batch(device, i)))
    may_read.set()
    thread.join(60)
    assert found == [(True, True)]


@pytest.mark.parametrize("option", [{"verify": 2}, {"memory_budget": 2**32}])
def test_options_with_which_nothing_is_lent(backend, device, width, option):
    model = layers(width, device).requires_grad_(False)
    plain, graphed = twice(model, cudagraph_transform(backend=backend, **option))
    with torch.no_grad():
        for i in range(5):
            same(plain(batch(device, i)), graphed(batch(device, i)))
    assert not is_lent(graphed)


def test_a_result_that_shares_memory_is_copied(backend, device, width):
    def views(x):
        y = x + 1
        return y, y[:1], y * 2

    plain, graphed = twice(views, cudagraph_transform(backend=backend))
    for i in range(5):
        got, want = graphed(batch(device, i)), plain(batch(device, i))
        same(want, got)
        assert got[0].data_ptr() == got[1].data_ptr() != got[2].data_ptr()
        del got
    graph = forward_of(graphed).pair.recordings[0].forward.graphs[0]
    assert len(graph.lent_results) == 1 and graph.nbytes_out == want[0].nbytes


def test_a_backward_whose_forward_saves_nothing(backend, device, width):
    """It lends gradients, not results, though it is no pair with its forward."""
    plain, graphed = twice(lambda x: (x * 2.0 + 1.0) * 3.0, cudagraph_transform(backend=backend))
    held = []
    for i in range(8):
        inputs = [batch(device, i).requires_grad_() for _ in range(2)]
        results = [fn(x) for fn, x in zip((plain, graphed), inputs)]
        held.append((results, [torch.autograd.grad(y.square().sum(), x)[0] for y, x in zip(results, inputs)]))
        for pairs in held:
            for want, got in pairs:
                same(want, got)
        held = held[-(i % 3) :]
    (backward,) = (program for program in programs(graphed) if program.kind == "backward")
    assert replays(graphed) >= 4 and not backward.gives_large


def test_small_results_are_copied(backend, device, monkeypatch):
    monkeypatch.undo()
    model = layers(16, device).requires_grad_(False)
    plain, graphed = twice(model, cudagraph_transform(backend=backend))
    x = torch.randn(4, 16, device=device)
    for _ in range(4):
        same(plain(x), graphed(x))
    assert not is_lent(graphed)


class Block:
    """What an allocator hands out, and gets back."""

    def __init__(self, free, address, nbytes):
        self._free, self._address, self._size = free, address, free.pop(address)
        if self._size >= 2 * nbytes:
            free[address + nbytes], self._size = self._size - nbytes, nbytes

    def data_ptr(self):
        return self._address

    def __del__(self):
        self._size += self._free.pop(self._address + self._size, 0)
        self._free[self._address] = self._size


def test_a_loan_finds_its_place_among_smaller_blocks():
    """The allocator hands out the smallest block that fits, and cuts a larger one."""
    storage = torch.empty(64, dtype=torch.uint8, device="cpu").untyped_storage()
    at = storage.data_ptr()
    segments = {at + 1000: 70, at + 2000: 150, at: 256, at + 3000: 400, at + 4000: 10}
    free, asked = dict(segments), []

    def allocate(nbytes):
        fits = [(size, address) for address, size in free.items() if size >= nbytes]
        if not fits:
            raise torch.OutOfMemoryError
        return Block(free, min(fits)[1], nbytes)

    ordered: list[int] = []
    loan = CudaLoan(storage, allocate, lambda: asked.append(1) or dict(free), lambda: ordered.append(1))
    assert loan.take() is storage and loan.has_owner() and loan.is_held() and len(ordered) == 1
    del storage
    assert not loan.has_owner() and not loan.is_held() and len(asked) == 1
    assert len(ordered) == 2  # a graph that writes there next does so after the stream that has read it
    assert free == segments
    assert not loan.is_held() and len(asked) == 1  # it remembers how many blocks come first
    held = free.pop(at)
    assert loan.is_held() and len(asked) == 2
    free[at] = held
    assert not loan.is_held() and free == segments


@pytest.mark.parametrize("nbytes", [0, 2**20])
def test_a_result_that_was_resized_has_given_its_place_up(nbytes):
    """``out=`` does it, too. Its storage still exists, but a graph that is captured now may write to the place."""
    storage = torch.empty(64, dtype=torch.uint8, device="cpu").untyped_storage()
    loan = CudaLoan(storage, lambda nbytes: pytest.fail("it is not gone"), dict, lambda: None)
    y = torch.empty(0, dtype=torch.uint8).set_(loan.take())
    assert loan.has_owner()
    y.untyped_storage().resize_(nbytes)
    assert not loan.has_owner() and loan.is_held()
