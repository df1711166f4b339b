"""Settings that a rule does not name choose no other kernels: results are the same bits whatever they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from thunder_cg.analysis import rules
from thunder_cg.compat.settings import Settings
from thunder_cg.compat.tensors import tree_leaves
from thunder_cg.tools.operators.cases import cases
from thunder_cg.tools.operators.samples import OperatorCase, Sample, seed_everything
from thunder_cg.verify.compare import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@contextmanager
def changed(groups: Settings) -> Iterator[None]:
    """Inside, the settings of these groups are not the default ones."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    before = [cudnn.enabled, cuda.matmul.fp32_precision, cudnn.conv.fp32_precision]
    blas, linalg = cuda.preferred_blas_library(), cuda.preferred_linalg_library()
    try:
        if Settings.MATMUL in groups:
            cuda.matmul.fp32_precision = "tf32"
            cuda.preferred_blas_library("cublaslt")
        if Settings.ATTENTION in groups:
            cuda.enable_flash_sdp(False)
            cuda.enable_mem_efficient_sdp(False)
            cuda.enable_cudnn_sdp(False)
        if Settings.CUDNN in groups:
            cudnn.conv.fp32_precision = "tf32"
            cudnn.enabled = False
        if Settings.LINALG in groups:
            cuda.preferred_linalg_library("cusolver")
        yield
    finally:
        cudnn.enabled, cuda.matmul.fp32_precision, cudnn.conv.fp32_precision = before
        cuda.preferred_blas_library(blas)
        cuda.preferred_linalg_library(linalg)
        for enable in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp):
            enable(True)


def result(sample: Sample, grad: bool) -> list[torch.Tensor]:
    """What the sample returns, and its gradients."""
    seed_everything(0)
    outputs = strided(sample.fn(*sample.args, **sample.kwargs))
    ends = [x for x in outputs if x.requires_grad and x.is_floating_point()]
    leaves = [x for x in strided((sample.args, sample.kwargs)) if x.is_leaf and x.requires_grad]
    gradients = []
    if grad and ends and leaves:
        gradients = strided(torch.autograd.grad(ends, leaves, [*map(torch.ones_like, ends)], allow_unused=True))
    return [x.detach().clone() for x in (*outputs, *gradients)]


def strided(tree: object) -> list[torch.Tensor]:
    """The tensors in a tree that are not sparse."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.layout == torch.strided]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def depends(case: OperatorCase, groups: Settings) -> bool:
    """Whether a result of the operator does. One that differs from call to call proves nothing."""
    for sample in case.draw("cuda", case.differentiable):
        try:
            expected = result(sample, case.differentiable)
            with changed(groups):
                found = result(sample, case.differentiable)
        except (RuntimeError, TypeError, NotImplementedError):
            continue  # it has no backward for these arguments, or its backward needs others
        again = [result(sample, case.differentiable) for _ in range(8)] if not same(found, expected) else []
        if again and all(same(each, expected) for each in again):
            return True
    return False


def test_rules_name_all_settings_that_matter():
    wrong = []
    measured = 0
    for name, case in cases("cuda").items():
        rule = rules.find(None, case.symbol) if case.symbol else None
        if rule is None or not rule.captures or rule.settings == Settings.ALL or not case.defined:
            continue
        measured += 1
        if depends(case, Settings.ALL & ~rule.settings):
            wrong.append(name)
    assert measured > 300
    assert not wrong, f"settings that their rules do not name change the results of {wrong}"


@pytest.mark.parametrize(
    ("name", "groups"), [("nn_functional_linear", Settings.MATMUL), ("nn_functional_conv2d", Settings.CUDNN)]
)
def test_settings_that_rules_name_do_matter(name, groups):
    case = next(case for key, case in cases("cuda").items() if key == name)
    assert depends(case, groups), "this test would not see a setting that matters"
