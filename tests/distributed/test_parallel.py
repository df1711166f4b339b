"""Thunder's parallelism in every order of transforms: the same bits on each rank as without graphs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

from thunder_cg import explain

ORDERS = (
    "ddp",
    pytest.param("ddp, transform last", marks=pytest.mark.nightly),
    "fsdp zero2",
    pytest.param("fsdp zero2, transform last", marks=pytest.mark.nightly),
    pytest.param("fsdp zero3", marks=pytest.mark.nightly),
    pytest.param("fsdp zero3, buckets", marks=pytest.mark.nightly),
    "tensor parallel",
    "tensor parallel, transform last",
    pytest.param("fused ddp", marks=pytest.mark.nightly),
    pytest.param("fused fsdp", marks=pytest.mark.nightly),
)


def same_bits(builder: str, steps: int, micro: int):
    import parallel

    build, shared = parallel.BUILDERS[builder], "tensor" in builder
    theirs = parallel.reference(builder.partition(",")[0], steps, micro)
    compiled = build(parallel.transform())
    ours = parallel.train(compiled, steps, shared=shared, micro=micro)
    return parallel.differing(ours, theirs), parallel.summary(compiled)


@pytest.mark.nightly_after(2)
@pytest.mark.parametrize("builder", ORDERS)
def test_same_bits(ranks: Ranks, builder: str) -> None:
    for differing, traces in ranks.run(same_bits, builder, 5, 1):
        assert not differing
        assert [trace["kind"] for trace in traces] == ["forward", "backward"]
        for trace in traces:
            assert not trace["fallbacks"] and trace["eager_calls"] == 1  # the warm-up
            assert trace["replays"] == [4] and not trace["eager"]
            assert trace["kind"] == "backward" or trace["fast_path_calls"] == 3


@pytest.mark.parametrize("builder", ["ddp", "fsdp zero2"])
@pytest.mark.nightly
def test_no_sync(ranks: Ranks, builder: str) -> None:
    """Three micro-batches, of which the last communicates."""
    for differing, traces in ranks.run(same_bits, builder, 4, 3):
        assert not differing
        assert all(trace["replays"] and min(trace["replays"]) >= 3 for trace in traces)


def without_gradients(builder: str):
    import parallel
    import torch

    uncaptured, compiled = (parallel.BUILDERS[builder](*graphs) for graphs in ([], [parallel.transform()]))
    whole, differing = parallel.model(), 0
    for step in range(4):
        tokens = parallel.tokens(step, shared=True)
        with torch.inference_mode(step > 1), torch.no_grad():  # each has a compilation of its own
            ours = compiled(tokens)
            differing += not torch.equal(ours, uncaptured(tokens))
            torch.testing.assert_close(ours, whole(tokens))
    return differing, [trace["replays"] for trace in parallel.summary(compiled)]


@pytest.mark.nightly
@pytest.mark.parametrize("builder", ["ddp", "fsdp zero2", "tensor parallel"])
def test_without_gradients(ranks: Ranks, builder: str) -> None:
    """Thunder 0.2.6 alone has no tensor parallelism there."""
    for differing, replays in ranks.run(without_gradients, builder):
        assert not differing
        assert replays and all(replays)


def recipe(code: str) -> str:
    variables: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), variables)
    return str(explain(variables["jmodel"]))


def test_recipe_of_the_readme(ranks: Ranks) -> None:
    """As it stands there, but for the group, which the ranks have already, and the device."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    recipes = re.findall(r"^```py\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (code,) = (each for each in recipes if "init_process_group" in each)
    others = {'dist.init_process_group("nccl")\n': "", "dist.destroy_process_group()\n": ""}
    if ranks.device == "cpu":
        others |= {'torch.device("cuda", dist.get_node_local_rank())': 'torch.device("cpu")'}
        others |= {"torch.cuda.set_device(device)\n": ""}
    for text, other in others.items():
        assert text in code
        code = code.replace(text, other)
    for report in ranks.run(recipe, code):
        assert "; 0 ops eager" in report and report.count("6 calls: 4 replayed, 1 warm-up, 1 capture") == 2
