"""Results reach the caller as copies, as views of inputs, or stay at their addresses."""

from __future__ import annotations

import torch

from thunder_cg.runtime.outputs import AliasedInput, Outputs


def test_outputs_are_copies_views_or_stay():
    x, y = torch.arange(4.0), torch.arange(6.0)
    produced = [x[1:], y, y.view(2, 3), torch.ones(2), None]
    outputs = Outputs(
        produced, [AliasedInput.of(0, x)], [True, True, True, False, True], torch.device("cpu"), torch.Tensor.detach
    )
    assert outputs.fixed == [3] and outputs.view_sources == {0: 0} and outputs.nbytes == 24
    other, results = torch.zeros(4), [None] * 5
    outputs.deliver_owned(results, [other])
    assert results[0].untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert results[1].untyped_storage().data_ptr() == results[2].untyped_storage().data_ptr() != y.data_ptr()
    y.fill_(7)
    assert results[1].tolist() == list(range(6)) and results[3] is None
    (target,) = outputs.allocate(again := [None] * 5)
    target.copy_(outputs.sources()[0])
    outputs.derive(again, [other])
    assert again[0].untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert again[1].tolist() == [7] * 6
