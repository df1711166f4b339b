"""Hand-built traces, with devices that this machine need not have, and real ones from ``thunder.jit`` on the CPU."""

from __future__ import annotations

import pytest
import thunder
import torch
from thunder.core.transform_common import Transform

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.classify import UserRules, classify
from thunder_cg.analysis.ops import Op, Ops, Value, read
from thunder_cg.analysis.partition import Plan, Region, partition


class Trace:
    """A trace written down op by op. Names that nothing defines are its arguments.

    A tensor whose name starts with ``c`` is on the CPU, with ``d`` on ``cuda:1``, others on ``cuda:0``; one that starts
    with ``n`` is a number, with ``f`` a future, with ``p`` a parameter. ``sizes`` gives bytes, 4 by default.
    """

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self.args: list[str] = []
        self.defined: set[str] = set()

    def op(self, id_: str | None, inputs: str = "", outputs: str = "", **kwargs: object) -> Trace:
        made = self.make(id_, inputs, outputs, index=len(self.ops), **kwargs)
        self.args += [n for n in made.inputs if n not in self.defined]
        self.defined.update((*made.inputs, *made.outputs))
        self.ops.append(made)
        return self

    def make(self, id_: str | None, inputs: str = "", outputs: str = "", index: int = 0, **kwargs: object) -> Op:
        for name in (*inputs.split(), *outputs.split()):
            self.values.setdefault(name, self.value(name))
        fields: dict = {"executor": "torch", "name": id_ or "Fusion0", **kwargs}
        return Op(index=index, id=id_, inputs=tuple(inputs.split()), outputs=tuple(outputs.split()), **fields)

    def value(self, name: str) -> Value:
        if name[0] == "n":
            return Value(name, "number")
        device = {"c": "cpu", "d": "cuda:1"}.get(name[0], "cuda:0")
        kind = "future" if name[0] == "f" else "tensor"
        return Value(name, kind, device, self.sizes.get(name, 4), static=name[0] == "p", dtype="float32")

    def add(self, inputs: str, outputs: str) -> Trace:
        return self.op("add", inputs, outputs)

    def item(self, inputs: str, outputs: str) -> Trace:
        return self.op("item", inputs, outputs, name="Tensor.item", line="model.py:7")

    def mine(self, inputs: str, outputs: str) -> Trace:
        return self.op("my_op", inputs, outputs, executor="my_ex", line="model.py:9")

    def returns(self, inputs: str) -> Trace:
        return self.op("RETURN", inputs, executor=None, bookkeeping=True)

    def done(self) -> Ops:
        made_by = {name: op for op in self.ops if not op.bookkeeping for name in op.outputs}
        return Ops(tuple(self.ops), self.values, tuple(self.args), made_by=made_by)

    def verdicts(
        self,
        allow: tuple[str, ...] = (),
        deny: tuple[str, ...] = (),
        device_type: str = "cuda",
        collectives: bool = True,
    ):
        ops, user = self.done(), UserRules(frozenset(allow), frozenset(deny))
        return classify(ops, Aliasing.of(ops), user, device_type, captures_collectives=collectives)

    def plan(self, **kwargs: object) -> Plan:
        return partition(self.done(), self.verdicts(**kwargs), Aliasing.of(self.done()))

    def regions(self, **kwargs: object) -> list[tuple[int, ...]]:
        return [step.ops for step in self.plan(**kwargs).steps if isinstance(step, Region)]


class Reads(Transform):
    """Keeps what `read` made of each final trace, forward first."""

    def __init__(self) -> None:
        self.ops: list[Ops] = []

    def transform_trace_post_optimization(self, trace, **kwargs):
        self.ops.append(read(trace))
        return trace


@pytest.fixture
def trace() -> type[Trace]:
    return Trace


@pytest.fixture
def traces_of(monkeypatch):
    """``traces_of(fn, *args)``: the analysed traces of one call, and of its backward if there is one.

    A trace shows what is in a fusion before `torch.compile` compiles it, which would take half a minute.
    """
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)

    def traces(fn, *args, **jit_options) -> list[Ops]:
        reads = Reads()
        thunder.jit(fn, transforms=[reads], **jit_options)(*args)
        return reads.ops

    return traces


@pytest.fixture
def on_cpu():
    """``on_cpu(ops)``: the plan for a trace on the CPU."""

    def plan(ops: Ops, allow: tuple[str, ...] = (), deny: tuple[str, ...] = ()) -> Plan:
        aliasing = Aliasing.of(ops)
        return partition(ops, classify(ops, aliasing, UserRules(frozenset(allow), frozenset(deny)), "cpu"), aliasing)

    return plan
