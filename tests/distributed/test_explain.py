"""`explain` shows collectives: which, how many bytes, in which group, captured or not, and whether they may overlap."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import Ranks


def collectives(builder: str, options: dict[str, Any]) -> tuple[str, list[list[dict[str, Any]]], list[int]]:
    """What the report says as text and as records, and the bytes of each parameter."""
    import parallel

    from thunder_cg import explain

    compiled = parallel.BUILDERS[builder](parallel.transform(**options))
    parallel.train(compiled, 3)
    report = explain(compiled)
    sizes = [p.numel() * p.element_size() for p in compiled.parameters()]
    return str(report), [trace["collectives"] for trace in report.to_dict()["traces"]], sizes


@pytest.mark.nightly
def test_ddp(ranks: Ranks) -> None:
    for text, (forward, backward), sizes in ranks.run(collectives, "ddp", {}):
        assert not forward and len(backward) == len(sizes)
        assert sorted(each["nbytes"] for each in backward) == sorted(sizes)
        for each in backward:
            assert (each["name"], each["ranks"], each["captured"]) == ("all_reduce", 2, True)
        total, overlapping = sum(sizes) / 1024, sum(each["overlaps"] for each in backward)
        assert {each["launch"] for each in backward} == {backward[0]["launch"]}  # all are small
        said = f"{len(sizes)} all_reduce of {total:.1f} KiB in 1 launch"
        said += f" in the group {backward[0]['group']} of 2 ranks, captured"
        assert f"  {said}; {overlapping} can overlap with compute\n" in text


@pytest.mark.nightly
def test_fsdp_with_eager_collectives(ranks: Ranks) -> None:
    options = {"capture_collectives": "never"}
    for text, (forward, backward), sizes in ranks.run(collectives, "fsdp zero2", options):
        assert {each["name"] for each in forward} == {"all_gather"} and len(forward) == len(sizes)
        assert {each["name"] for each in backward} == {"reduce_scatter"} and len(backward) == len(sizes)
        for each in (*forward, *backward):
            assert not each["captured"] and each["issued_by"] < each["waited_by"]
        assert len({each["launch"] for each in (*forward, *backward)}) == 2 * len(sizes)  # only regions coalesce
        # Both are of the whole parameter; each rank keeps half of it.
        assert sum(each["nbytes"] for each in forward) == sum(each["nbytes"] for each in backward) == 2 * sum(sizes)
        assert text.count("of 2 ranks, eager; ") == 2


def refusals(builder: str) -> list[str]:
    """What `plan` and `bisect` say of a module that is sharded."""
    import parallel

    from thunder_cg import bisect, plan
    from thunder_cg.errors import NotCompiledError

    compiled = parallel.BUILDERS[builder](parallel.transform())
    found = []
    for function in (bisect, plan) if "fsdp" in builder else (bisect,):
        with pytest.raises(NotCompiledError) as caught:
            function(compiled, parallel.tokens(0))
        found.append(str(caught.value))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("builder", ["fsdp zero2", "tensor parallel"])
def test_what_would_shard_again_is_refused(ranks: Ranks, builder: str) -> None:
    """`bisect` would compare graphs with those of other parameters."""
    for messages in ranks.run(refusals, builder):
        assert messages and all("would shard them again" in message for message in messages)
