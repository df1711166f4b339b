"""The advice for a number that is read from a tensor is for what the line does with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from thunder_cg.analysis import advice
from thunder_cg.analysis.rules import FIXED_SIZE, KEEP_ON_DEVICE
from thunder_cg.analysis.sources import SourceLine

CHOOSE, SLICE = "choose with torch.where(condition, a, b)", "x[i + torch.arange(n)] is x[i : i + n]"
TENSOR, AFTER = "operators take a 0-dim tensor in the place of a number", "or write it into a buffer, and log or keep"
SIZE, LOOP = "compute with the largest size", "loop as often as the longest case needs"
CHECK = "return the condition as a 0-dim tensor, and check it after the call"
SPLIT = "keep the mask, and sum torch.where(mask.unsqueeze(-1), x, 0.0) for each part"
UNBIND, READ_AFTER = "Tensor.unbind in the place of tolist()", "return the 0-dim tensor, and read it after the call"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("if x.norm().item() > 3: x = x / 2", CHOOSE),
        ("while float(x.sum()) > 0:\n        pass", LOOP),
        ("x = x if bool(x.any().item()) else y", CHOOSE),
        ("assert x.item() > 0", CHECK),
        ("assert x.isfinite().all()", CHECK),
        ("if x.isnan().any(): raise ValueError", CHECK),
        ("if x.isnan().any():\n        raise ValueError\n    else:\n        x = y", CHOOSE),
        ("x = [a for a in xs if a.item()]", CHOOSE),
        ("flag = x.item() > 0\n    if flag: x = y", CHOOSE),
        ("x = x[: n.item()]", "mask the rest, before layers that mix positions, too"),
        ("n: int = int(n.item())\n    x = x * 2\n    x = x[n : n + 2]", SLICE),
        ("x = x / max(x.norm().item(), 1e-6)", "torch.clamp(value, min=...) in the place of max()"),
        ("x = x * x.sum().item() + 1", TENSOR),
        ("x = torch.sin(x / k.item())", TENSOR),
        ("x = x.mul(k.item())", TENSOR),
        ("x = x * x.sum().item()\n    return x", TENSOR),
        ("x = x / k.item()\n    self.last = x", TENSOR),
        ("x = x[k.item()]", TENSOR),
        ("x = (\n        x\n        * k.item()\n    )", TENSOR),
        ("k = int(k.item()) % 2\n    x = self.layers[k](x)", "call each of them, and choose with torch.where"),
        ("k = x.sum().item() * 2\n    x = x / k", TENSOR),
        ("x = self.layers[k.item()](x)", "call each of them, and choose with torch.where"),
        ("print('norm', x.norm().item())", AFTER),
        ("self.seen.append(float(x.mean()))", AFTER),
        ("means.append(x.sum() / n.item())", TENSOR),
        ("self.last = x.mean().item()", AFTER),
        ("said = f'{x.item():.2f}'", AFTER),
        ("x = torch.zeros(n.item())", SIZE),
        ("x = x.view(int(n.item()), -1)", SIZE),
        ("for _ in range(n.item()): x = x * 2", LOOP),
        ("for t in x.tolist(): y = y * t", UNBIND),
        ("a, b = x.tolist()", UNBIND),
        ("k = n.tolist()\n    return k", UNBIND),
        ("k = n.sum(1).tolist()\n    return [part.sum(0) for part in x.split(k)]", SPLIT),
        ("x = torch.split(x, n.tolist())", SPLIT),
        ("return y, x.norm().item()", READ_AFTER),
        ("k = x.norm().item()\n    return y, k", READ_AFTER),
        ("fns.append(lambda x: float(x.sum()))", READ_AFTER),
        ("if x.sum() > 0: x = y", CHOOSE),
        ("x = x[:, : n.max()]", SLICE),
        ("x = x[:, : len(y)]", KEEP_ON_DEVICE),
        ("for _ in range(n.max()): x = x * 2", LOOP),
        ("said = f'{x:.2f}'", AFTER),
        ("k = x.norm().item()", KEEP_ON_DEVICE),
        ("x = y", KEEP_ON_DEVICE),
    ],
)
def test_advice_for_a_read(tmp_path: Path, lines: str, expected: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        f"def forward(self, x, y, xs, n, k):\n    pass\n    {lines}\n\ndef other(k, n, flag):\n    return k\n"
    )
    number = 3 + next(i for i, each in enumerate([*lines.splitlines(), "item"]) if "item" in each or "float" in each)
    number = number if number < 3 + len(lines.splitlines()) else 3
    said = advice.for_read(SourceLine(str(file), number))
    assert expected in said and len(said) < 180


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = x * (x.abs().mean().item() + 1.0)", "in training with torch.no_grad(): number = x.abs().mean(), as a"),
        (f"x = x * {'x.abs().' * 9}mean().item()", "in training under torch.no_grad(), as a number has no gradient"),
        ("x = x * float(x.mean())", "in training under torch.no_grad(), as a number has no gradient"),
    ],
)
def test_advice_has_the_form_to_copy(tmp_path: Path, line: str, expected: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(f"{line}\n")
    assert expected in advice.for_read(SourceLine(str(file), 1))


def test_advice_for_a_branch(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("while x > 0:\n    if x > 1: pass\nif x > 2:\n    print(x)\nif x.item() > 2:\n    log(x)\n")
    assert "after the call" in advice.for_branch(SourceLine(str(file), 3))
    assert "after the call" in advice.for_read(SourceLine(str(file), 5))
    assert LOOP in advice.for_branch(SourceLine(str(file), 1)) and CHOOSE in advice.for_branch(SourceLine(str(file), 2))


def test_advice_for_a_read_in_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("y = x.item(\n")
    for file in (tmp_path / "broken.py", tmp_path / "missing.py"):
        assert advice.for_read(SourceLine(str(file), 1)) == KEEP_ON_DEVICE
    assert advice.for_read(None) == KEEP_ON_DEVICE


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("torch.bincount", "in the place of bincount"),
        ("torch.repeat_interleave y = x", "in the place of repeat_interleave(x, counts)"),
        ("torch.nonzero", "with n rows always, filled up with -1, the index of the last element; or"),
        ("getitem y = x[x > 0]", "mask.unsqueeze(-1) for rows, in the place of x[mask]: it keeps the shape of x"),
        ("getitem loss = F.cross_entropy(logits[mask], y[mask])", "torch.where(mask, target, -100)) in the place of"),
        ("torch.unique", FIXED_SIZE),
    ],
)
def test_advice_for_a_size(said: str, expected: str) -> None:
    assert expected in advice.for_size(said)
    assert advice.fitting(FIXED_SIZE, said, None) == advice.for_size(said)
