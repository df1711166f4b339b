"""Memory of the pool for inputs that are copied, and inputs that no graph can have."""

from __future__ import annotations

import pytest
import torch

from thunder_cg.analysis.partition import Region
from thunder_cg.analysis.region_io import RegionInput, RegionIO
from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.inputs import static_buffer
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.runtime.tape import TapeBackend
from thunder_cg.runtime.tensors import overlaps_itself


@pytest.mark.parametrize(
    "like",
    [
        torch.randn(4, 4),
        torch.randn(4, 4).t(),
        torch.randn(17)[1:].view(4, 4),
        torch.randn(8, 4)[::2],
        torch.randn(4).expand(3, 4),
        torch.randn(6).as_strided((3, 3), (1, 1)),
        torch.zeros(0, 3),
        torch.zeros(3, dtype=torch.complex64).conj(),
    ],
)
def test_a_static_buffer_is_laid_out_like_its_input(like):
    buffer = static_buffer(TapeBackend().pool(torch.device("cpu")), like)
    assert buffer.stride() == like.stride() and buffer.shape == like.shape and buffer.is_conj() == like.is_conj()
    assert buffer.data_ptr() % 16 == like.data_ptr() % 16 or like.numel() == 0
    assert overlaps_itself(buffer) == overlaps_itself(like)


def test_an_input_on_another_device_than_the_trace_says_is_refused():
    inputs = tuple(RegionInput(name, written=False, aliased=False) for name in ("x", "seed"))
    io = RegionIO(inputs, (), (), frozenset())
    region = RuntimeRegion("CUDAGraph1", Region((), "meta", ""), (), io, lambda inputs: ())
    with pytest.raises(CaptureRefused, match="input 'seed' is on cpu, and the graph on meta"):
        region._check_inputs([torch.empty(2, device="meta"), torch.tensor(0)], frozenset())
