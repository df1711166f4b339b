"""All cases of the operator sweep: PyTorch's table of operators, other names for these operators, handwritten calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from thunder_cg.compat.operators import operator_table
from thunder_cg.compat.thunder import symbols_of_functions
from thunder_cg.tools.operators.handwritten import HANDWRITTEN
from thunder_cg.tools.operators.samples import OperatorCase, Sample, symbol_of

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool,
    torch.float8_e4m3fn,
)  # fmt: skip


@cache
def cases(device: str) -> dict[str, OperatorCase]:
    """All cases by name, in the order in which they are run."""
    found: dict[str, OperatorCase] = {}
    for op in operator_table():
        dtype = next((d for d in DTYPES if d in op.supported_dtypes(device)), None)
        if dtype is None:
            continue
        found[op.formatted_name] = _case(op, op.formatted_name, op.op, dtype)
        if op.inplace_variant is not None:
            name = f"{op.formatted_name} in place"
            found[name] = _case(op, name, op.inplace_variant, dtype, inplace=True)
    for case in _other_names(device):
        found[case.name] = case
    for case in HANDWRITTEN:
        if case.device in ("", device):
            found[case.name] = case
    return found


def _case(op: Any, name: str, fn: Callable[..., Any], dtype: torch.dtype, inplace: bool = False) -> OperatorCase:
    known_as = getattr(symbols_of_functions().get(fn), "name", "")
    return OperatorCase(
        name,
        partial(_samples, op, fn, dtype, inplace),
        str(dtype).removeprefix("torch."),
        differentiable=op.supports_autograd and not inplace and (dtype.is_floating_point or dtype.is_complex),
        defined=not op.name.startswith(("empty", "new_empty")),
        symbol="" if inplace or op.name.startswith("sparse.") else symbol_of(known_as or op.name),
    )


def _samples(
    op: Any, fn: Callable[..., Any], dtype: torch.dtype, inplace: bool, device: str, grad: bool
) -> Iterator[Sample]:
    for sample in op.sample_inputs(device, dtype, requires_grad=grad, set_seed=False):
        if not (inplace and sample.broadcasts_input):
            yield Sample(fn, (sample.input, *sample.args), sample.kwargs)


def _other_names(device: str) -> Iterator[OperatorCase]:
    """Functions that Thunder knows and the table does not: aliases, methods, and forms that copy instead of viewing."""
    symbols = symbols_of_functions()
    reached = {id(symbols[op.op]) for op in operator_table() if op.op in symbols}
    entries: dict[str, Any] = {}
    for op in operator_table():
        names = [op.name, op.aten_name, *(alias.name for alias in op.aliases)]
        for name in names:
            entries.setdefault(name.rsplit(".", 1)[-1], op)
            entries.setdefault(name.removeprefix("linalg_").removeprefix("special_").removeprefix("fft_"), op)
    for fn, symbol in symbols.items():
        name = getattr(fn, "__name__", "")
        op = entries.get(name) or entries.get(name.removesuffix("_copy"))
        if id(symbol) in reached or op is None or name.endswith("_"):
            continue
        reached.add(id(symbol))
        dtype = next((d for d in DTYPES if d in op.supported_dtypes(device)), None)
        if dtype is not None:
            yield _case(op, f"{op.formatted_name} as {_qualified(fn)}", fn, dtype)


def _qualified(fn: Any) -> str:
    module = getattr(fn, "__module__", None) or getattr(getattr(fn, "__objclass__", None), "__name__", "") or "torch"
    return f"{module}.{fn.__name__}".replace("._C.", ".").replace("torch._", "torch.")
