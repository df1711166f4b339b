"""Settings of NCCL and of the allocator that change how collectives run: graphs hold them, or say why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Ranks

SETTINGS = {
    "register": {"NCCL_GRAPH_REGISTER": "1"},
    "no register": {"NCCL_GRAPH_REGISTER": "0"},
    "no mixing": {"NCCL_GRAPH_MIXING_SUPPORT": "0"},
    "expandable segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"},
    "NaN check": {"TORCH_NCCL_NAN_CHECK": "1"},
    "no error handling": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
    "no event cache": {"TORCH_NCCL_CUDA_EVENT_CACHE": "0"},
    "timing": {"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_NCCL_DESYNC_DEBUG": "1"},
    "blocking wait": {"TORCH_NCCL_BLOCKING_WAIT": "1"},
}


def train(builder: str) -> tuple[int, list[dict[str, Any]], list[str]]:
    import parallel

    from thunder_cg import explain

    theirs = parallel.reference(builder, 6, 1)
    compiled = parallel.BUILDERS[builder](parallel.transform())
    ours = parallel.train(compiled, 6)
    report = explain(compiled).to_dict()
    details = [op["detail"] for trace in report["traces"] for op in trace["ops"] if op["verdict"] == "eager"]
    return parallel.differing(ours, theirs), parallel.summary(compiled), details


@pytest.mark.nightly
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, which read them at the start."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    for variable, value in SETTINGS[name].items():
        monkeypatch.setenv(variable, value)
    ranks = Ranks(2, "cuda")
    try:
        for builder in ("ddp", "fsdp zero2"):
            for differing, traces, details in ranks.run(train, builder, timeout=150.0):
                assert not differing
                if name == "blocking wait":
                    assert any("TORCH_NCCL_BLOCKING_WAIT" in detail for detail in details)
                    assert not any(trace["replays"] for trace in traces if trace["collectives"] and not trace["eager"])
                else:
                    assert all(trace["replays"] == [5] and not trace["eager"] for trace in traces)
    finally:
        ranks.close()
