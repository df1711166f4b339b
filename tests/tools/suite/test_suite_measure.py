"""Small models go through all of it, and a model that fails says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
import thunder
import torch
from suite_models import MODELS, Small, entry, measured
from support import run_what_inductor_gets

from thunder_cg import cudagraph_transform
from thunder_cg.tools.suite import measure, models
from thunder_cg.tools.suite.results import (
    BREAK,
    DECODE,
    EAGER,
    FORWARD,
    FX,
    INDUCTOR,
    JIT,
    NOT_REPLAYED,
    TRAINING,
    SuiteRow,
)

CPU = torch.device("cpu")


def outside(found: SuiteRow) -> set[tuple[str, str]]:
    return {(part.kind, part.what) for part in found.outside}


@pytest.fixture
def operator() -> Iterator[Callable[..., Any]]:
    """Registers an operator of the user's own that adds what `number()` says."""
    executor = thunder.extend.OperatorExecutor("suite")
    thunder.extend.register_executor(executor)
    thunder.extend.add_default_executor(executor)
    meta = thunder.core.proxies.TensorProxy
    yield lambda name, number: executor.register_operator(name, fn=lambda x: x + number(), meta=lambda x: meta(like=x))
    thunder.extend.remove_default_executor(executor)
    thunder.extend.deregister_executor(executor)


def test_a_model_in_one_region(net: SuiteRow) -> None:
    found = net
    assert (found.path, found.not_jit, found.failure) == (JIT, "", "")
    assert (found.agrees, found.regions, found.replayed, found.graphs, found.outside) == ("yes", 1, 1, 1, [])
    assert 3 <= found.captured == found.ops
    assert found.thunder_us == found.captured_us == 0.0, "a CPU's times say nothing"


def test_training_counts_both_ways(net: SuiteRow) -> None:
    found = measured("Net", TRAINING)
    assert (found.agrees, found.regions, found.replayed, found.failure) == ("yes", 2, 2, "")
    assert found.captured > net.captured


def test_an_eager_op_is_counted_and_named() -> None:
    found = measured("Item")
    assert found.captured < found.ops and found.regions >= 1 and found.agrees == "yes"
    assert (EAGER, "Tensor.item") in outside(found)
    (item,) = (part for part in found.outside if part.what == "Tensor.item")
    assert item.count == 1 and item.why == "depends on what tensors hold"


@pytest.mark.nightly
def test_what_dynamo_breaks_is_counted() -> None:
    found = measured("Branch")
    assert found.path == FX and found.not_jit and found.agrees == "yes"
    assert {part.kind for part in found.outside} == {BREAK, EAGER}  # the product alone is too small a region
    (found_break,) = (part for part in found.outside if part.kind == BREAK)
    assert re.fullmatch(r"return y .* \(suite_models\.py:\d+.*\)", found_break.what)
    assert found_break.why == "a branch on what a tensor holds"
    assert found.graphs == 2


@pytest.mark.nightly
def test_where_thunder_jit_has_wrong_gradients_thunderfx_is_measured() -> None:
    found = measured("Overwrites", TRAINING)
    assert (found.path, found.agrees, found.failure) == (FX, "yes", "") and "another gradient" in found.not_jit


def test_what_thunderfx_leaves_to_inductor_is_an_op_that_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    run_what_inductor_gets(monkeypatch)
    found = measured("Diagonal")
    assert found.path == FX and (INDUCTOR, "fill_diagonal_") in outside(found)
    assert found.ops > found.captured and found.agrees == "yes"


def test_what_thunder_cannot_do_says_so_for_both_its_ways() -> None:
    found = measured("Broken")
    assert found.failure.startswith("ThunderError: uncaptured, thunder.jit: RuntimeError: no such thing; thunderfx: ")
    assert found.agrees == "" and found.ops == 0


def test_a_region_that_does_not_replay_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "STEPS", 1)  # the first call only warms up
    found = measured("Small")
    assert (found.regions, found.replayed) == (1, 0)
    assert outside(found) == {(NOT_REPLAYED, "region")}


def test_other_numbers_are_found(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that reads the host is frozen when it is captured by force."""
    seeded = operator("add_seed", torch.initial_seed)

    class Seeded(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(seeded(x))

    monkeypatch.setattr(measure, "cudagraph_transform", partial(cudagraph_transform, allow=["add_seed"]))
    found = measure.measure(entry(Seeded), FORWARD, CPU)
    assert found.agrees.startswith("no: output 0 of step 2, by up to ")


@pytest.mark.nightly
def test_numbers_that_vary_without_graphs_are_not_held_against_them(operator: Any) -> None:
    numbers = count()
    counted = operator("add_count", lambda: next(numbers))

    class Counted(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(counted(x))

    found = measure.measure(entry(Counted), FORWARD, CPU)
    assert found.agrees.startswith("Thunder varies: output 0 of step 0, by up to ")


@pytest.mark.nightly
def test_where_thunder_varies_kernels_that_do_not_tell(operator: Any) -> None:
    numbers = count()
    deterministic = torch.are_deterministic_algorithms_enabled
    noisy = operator("add_noise", lambda: 0 if deterministic() else next(numbers))

    class Noisy(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(noisy(x))

    found = measure.measure(entry(Noisy), FORWARD, CPU)
    assert found.agrees == "yes: with deterministic algorithms everywhere"
    assert not deterministic()


def test_all_that_a_step_leaves_is_compared() -> None:
    side = measure.CompiledSide(MODELS["Net"], TRAINING, CPU, JIT, [])
    names = {*side.results(next(measure.model_inputs(MODELS["Net"], TRAINING, CPU)), 0)}
    assert {"output 0", "loss", "gradient of first.weight", "buffer norm.running_var"} < names


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"a": torch.tensor([1.0, -0.0])}, "a of step 3, by up to 0"),
        ({"a": torch.ones(3)}, "a of step 3 is torch.float32 (3,), not torch.float32 (2,)"),
        ({"a": torch.tensor([1.0, 0.0]), "b": torch.ones(1)}, "b of step 3 is only there with graphs"),
        ({}, "a of step 3 is only there without graphs"),
        ({"a": torch.tensor([1.0, 0.0])}, ""),
    ],
)
def test_the_first_difference_is_named(found: dict[str, torch.Tensor], said: str) -> None:
    assert measure._first_difference({"a": torch.tensor([1.0, 0.0])}, found, 3) == said


def test_batches_are_fresh_and_the_same_for_both_sides() -> None:
    one, other = (measure.model_inputs(MODELS["Net"], FORWARD, CPU) for _ in range(2))
    first, second = next(one).args[0], next(one).args[0]
    assert torch.equal(first, next(other).args[0]) and not torch.equal(first, second)


@pytest.mark.parametrize("mode", [FORWARD, TRAINING])
@pytest.mark.parametrize("name", sorted(models.MODELS, key=lambda name: models.MODELS[name].package != "torch"))
@pytest.mark.nightly_after(2)
def test_models_of_other_packages(name: str, mode: str) -> None:
    model = models.MODELS[name]
    pytest.importorskip(model.package)
    found = measure.measure(model, mode, CPU)
    if name.startswith("ViT") and mode == TRAINING and found.failure.startswith("ThunderError"):
        pytest.skip(found.failure)  # with some versions of torchvision
    assert (found.failure, found.agrees) == ("", "yes")
    assert found.replayed == found.regions > 0


@pytest.mark.parametrize(
    "name",
    [
        *("Llama 3.2 1B, 4 layers", "pythia-160m", "Qwen3 0.6B, 4 layers", "GPT-2", "Gemma 3 1B, 6 layers"),
        *("OLMoE 1B-7B, 2 layers", "Mixtral 8x7B, 1 layer", "DeepSeek V3, 2 layers, 16 experts"),
    ],
)
@pytest.mark.nightly_after(2)
def test_a_decoded_token(name: str) -> None:
    model = models.MODELS[name]
    pytest.importorskip(model.package)
    found = measure.measure(model, DECODE, CPU)
    assert (found.failure, found.agrees) == ("", "yes")
    assert found.replayed == found.regions
    assert found.regions == 1 or "grouped_mm_fallback" in str(found.outside)
