"""Programs and call patterns as frozen data: what they are, how they read as Python, and what they mean to PyTorch.

A program is a module's ``forward``, written as lines of Python over a pool of values. A pattern is what a user does
with the compiled module: calls, backwards, optimizer steps, writes to whatever he can reach.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 4
ROWS = (3, 2)  # how many rows an input may have; a program has to be right for each

# ------------------------------------------------------------------------------------------------------------ operators

# Thunder interprets what it traces: a function takes it 1 ms, a method of a tensor 20, and ``nn.Module.__call__`` 150.
# Hence functions where a method adds nothing, and a module that is called directly.
#
# Each template is a line of ``forward``. ``{a}``, ``{b}`` are values of the pool, ``{k}`` one of the constants, ``{n}``
# a number that an earlier line has read, ``{m}`` a new one, ``{r}``, ``{s}`` new values. Where PyTorch refuses
# a line for some values, others are tried, so that nothing here has to know which shapes and types an operator takes.
TEMPLATES: dict[str, tuple[str, ...]] = {
    "elementwise": (
        "{r} = torch.tanh({a})",
        "{r} = torch.mul(torch.sin({a}), {k})",
        "{r} = torch.relu({a})",
        "{r} = torch.neg({a})",
        "{r} = torch.add({a}, {b})",
        "{r} = torch.mul({a}, {b})",
        "{r} = {a} - {k}",
        "{r} = torch.where(torch.gt({a}, {k}), {a}, {b})",
        "{r} = torch.maximum({a}, {b})",
        "{r} = torch.gt({a}, {b})",
        "{r} = torch.add(torch.sigmoid({a}), {b})",
        "{r} = torch.masked_fill({a}, torch.gt({a}, {k}), 0.5)",
        "{r} = torch.addcmul({a}, {b}, {b})",
    ),
    "reduction": (
        "{r} = torch.sum({a})",
        "{r} = torch.mean({a}, 0)",
        "{r} = torch.softmax({a}, -1)",
        "{r} = torch.amax({a}, -1, keepdim=True)",
        "{r} = torch.cumsum({a}, 0)",
        "{r}, {s} = torch.var_mean({a}, 0)",
        "{r}, {s} = torch.topk({a}, 2)",
        "{r} = torch.argmax({a}, -1)",
    ),
    "matmul": (
        "{r} = torch.matmul({a}, {b})",
        "{r} = torch.tanh(torch.matmul({a}, self.w))",
        "{r} = F.linear({a}, self.w, self.u)",
        "{r} = F.gelu(F.linear({a}, self.linear.weight, self.linear.bias))",
        "{r} = torch.matmul({a}, torch.transpose({b}, 0, 1))",
        "{r} = F.layer_norm({a}, (4,), self.u)",
        "{r} = F.scaled_dot_product_attention({a}[None, None], {a}[None, None], {a}[None, None])[0, 0]",
        "{r} = F.embedding(torch.clamp(({a} * 2).long(), 0, 3), self.w)",
    ),
    "view": (
        "{r} = {a}.t()",
        "{r} = {a}[1:]",
        "{r} = {a}[:, 1:]",
        "{r} = {a}[:, ::2]",
        "{r} = {a}[0]",
        "{r} = {a}.view(-1)",
        "{r} = torch.reshape({a}, (-1,))",
        "{r} = torch.unsqueeze({a}, 0)",
        "{r} = {a}.expand(2, *{a}.shape)",
        "{r}, {s} = torch.chunk({a}, 2)",
        "{r} = torch.transpose({a}, 0, -1)",
        "{r} = {a}.view_as({a})",
        "{r} = {a}.contiguous()",
        "{r} = torch.clone({a})",
        "{r} = {a}.detach()",
        "{r} = torch.flatten({a})",
        "{r} = torch.squeeze({a}, 0)",
        "{r} = {a}.view(-1)[1:3]",
        "{r} = torch.permute({a}, (1, 0))",
        "{r}, {s} = torch.split({a}, 2, 1)",
    ),
    "dtype": (
        "{r} = {a}.to(torch.bfloat16)",
        "{r} = {a}.double()",
        "{r} = {a}.float()",
        "{r} = {a}.long()",
        "{r} = {a}.to({b}.dtype)",
    ),
    "in-place": (
        "{a}.add_({k})",
        "{a}.mul_({k})",
        "{a}.add_({b})",
        "{a}.copy_({b}.expand_as({a}))",
        "{a}.tanh_()",
        "{a}.zero_()",
        "{r} = {a}.sub_({b})",
        "{a}.clamp_(-1.0, 1.0)",
        "{a}.view(-1).add_({k})",
        "{a}.t().mul_({k})",
        "{a} += {k}",
        "{r} = torch.relu_({a})",
    ),
    "setitem": (
        "{a}[0] = {k}",
        "{a}[1:] = {b}[1:]",
        "{a}[:, 0] = {b}[:, 1]",
        "{a}[0] = {b}[1]",
        "{a}[:, ::2] = {k}",
        "{a}[0, 1] = torch.sum({b})",
        "{a}[torch.gt({a}, {k})] = {k}",
        "{a}[torch.gt({b}, {k})] = 0.5",
    ),
    "buffer": (
        "self.b.add_(torch.mean({a}.detach().float())).mul_(0.5)",
        "self.b.copy_((torch.amax({a}.detach().float()) * 0.1).expand(4))",
        "self.b = self.b * 0.5 + torch.mean({a}.detach().float())",
        "self.b[0] = torch.mean({a}.detach().float())",
        "self.c = self.c + 1",
        "self.c.add_(1)",
        "{r} = torch.add({a}, self.b)",
        "{r} = torch.mul({a}, self.b)",
        "{r} = self.b.view(2, 2)",
        "{r} = self.norm({a})",
        "{r} = {a} + self.c.clamp(0, 3)",
    ),
    "item": (
        "{m} = torch.sum({a}).item()",
        "{m} = torch.amax({a}).item()",
        "{m} = self.c.item()",
        "{r} = {a} * {n}",
        "{r} = torch.add({a}, {n})",
    ),
    "random": (
        "{r} = F.dropout({a}, 0.4, self.training)",
        "{r} = torch.add({a}, torch.rand({a}.shape, device={a}.device))",
        "{r} = torch.mul({a}, torch.randn({a}.shape, device={a}.device))",
        "{r} = torch.rand_like({a})",
        "{r} = torch.bernoulli(torch.mul(torch.gt({a}, {k}), 0.4))",
    ),
    "opaque": (
        "{r} = ops.keep({a})",
        "{r} = ops.write({a})",
        "{r} = ops.window({a})",
        "{r} = ops.note({a})",
        "{r} = ops.draw({a})",
        "{r} = ops.flaky({a})",
        "{r} = ops.keep(torch.mul({a}, 2))",
        "{r} = library.scale({a}, {k})",
        "{r} = library.product({a}, {b})",
    ),
    "other": (
        "{r} = torch.ones_like({a})",
        "{r} = torch.add(torch.arange(4, device={a}.device), {a})",
        "{r} = torch.zeros(3, 4, device={a}.device)",
        "{r} = torch.mul({a}, self.k)",
        "{r} = {a} if self.training else {b}",
        "{r} = torch.mul({a}, {a}.shape[0])",
        "{r} = torch.cat([{a}, {b}])",
        "{r} = torch.stack([{a}, {b}])",
        "{r} = {a}[torch.arange(2, device={a}.device)]",
        "{r} = torch.gather({a}, 0, torch.zeros_like({a}, dtype=torch.long))",
    ),
}
CONSTANTS = (0.5, 1.5, -0.75, 2.0)
_IMPURE = ("_(", "] = ", " += ", "self.b = ", "self.c = ", "rand", "dropout", "bernoulli", "norm(", "ops.")
_WRITING = {*TEMPLATES["in-place"], *TEMPLATES["setitem"]}
LINES = tuple(line for lines in TEMPLATES.values() for line in lines)
# Operators, as Thunder's traces name them, that a program may leave eager: of views, of writes, and of all else.
DENIED = (
    *("permute", "expand", "unsqueeze", "torch_slice_prim_impl", "torch_prims_reshape_impl", "to", "shallow_copy"),
    *("copy_", "update_aliases", "add", "mul", "tanh", "sum", "where", "matmul", "linear"),
)


@dataclass(frozen=True)
class Gene:
    """A line before anybody knows which values it is about: numbers pick from those that fit, the newest first."""

    line: str
    a: int = 0
    b: int = 0
    k: int = 0


@dataclass(frozen=True)
class Program:
    """A module's ``forward``.

    Attributes:
        inputs: how many tensors it takes.
        lines: of its body.
        outputs: expressions that it returns.
        is_pure: whether calls may run at the same time, because they neither write nor draw.
    """

    inputs: int
    lines: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    is_pure: bool = False

    @property
    def text(self) -> str:
        return "\n".join((*self.lines, *self.outputs))

    def source(self) -> str:
        """The module, as a user would write it."""
        arguments = ", ".join(f"x{i}" for i in range(self.inputs))
        body = "\n        ".join((*self.lines, f"return {', '.join(self.outputs)},"))
        members = "\n        ".join(line for name, line in MEMBERS.items() if f"self.{name}" in self.text)
        return f"""class Module(nn.Module):
    def __init__(self):
        super().__init__()
        {members or "pass"}

    def forward(self, {arguments}):
        {body}

    __call__ = forward
"""

    def module(self, scope: dict[str, Any]) -> nn.Module:
        """An instance of it. ``scope`` has the operators that are not PyTorch's."""
        source = self.source()
        name = f"<program {next(_numbers)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        namespace: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "__name__": "program", **scope}
        exec(compile(source, name, "exec"), namespace)
        return namespace["Module"]()


_numbers = count()
MEMBERS = {
    "w": "self.w = nn.Parameter(torch.randn(4, 4))",
    "u": "self.u = nn.Parameter(torch.randn(4))",
    "linear": "self.linear = nn.Linear(4, 4)",
    "norm": "self.norm = nn.BatchNorm1d(4)",
    "b": 'self.register_buffer("b", torch.randn(4))',
    "c": 'self.register_buffer("c", torch.tensor(0))',
    "k": "self.k = 2",
}


class Everything(nn.Module):
    """All that a program's ``self`` may have, for a dry run."""

    def __init__(self) -> None:
        super().__init__()
        for line in MEMBERS.values():
            exec(line, {"torch": torch, "nn": nn}, {"self": self})


class _DryRun:
    """Runs lines in eager PyTorch as they are chosen, for each number of rows, so that only lines that work are."""

    def __init__(self, inputs: int, scope: dict[str, Any]) -> None:
        self.spaces = []
        for rows in ROWS:
            values = {f"x{i}": torch.rand(rows, WIDTH) for i in range(inputs)}
            self.spaces.append({"torch": torch, "F": F, **scope, "self": Everything(), **values})
        self.values = ["self.u", "self.w", *(f"x{i}" for i in range(inputs))]  # oldest first
        self.numbers: list[str] = []
        self.lines: list[str] = []

    def add(self, gene: Gene) -> None:
        """Adds the gene's line with the first values that it works for; nothing if there are none."""
        for a, b in self._operands(gene):
            names = {name: f"v{len(self.lines)}{name}" for name in "rs"}
            number = f"n{len(self.lines)}"
            known = self.numbers[-1 - gene.b % len(self.numbers)] if self.numbers else ""
            if "{n}" in gene.line and not known:
                return
            k = CONSTANTS[gene.k % len(CONSTANTS)]
            line = gene.line.format(a=a, b=b, k=k, n=known, m=number, **names)
            if self._runs(line):
                self.lines.append(line)
                self.values += [names[name] for name in "rs" if f"{{{name}}}" in gene.line]
                self.numbers += [number] if "{m}" in gene.line else []
                return

    def _operands(self, gene: Gene) -> Iterator[tuple[str, str]]:
        newest = self.values[::-1]
        count = len(newest)
        for i in range(min(count, 6)):
            for j in range(min(count, 6) if "{b}" in gene.line else 1):
                a, b = newest[(gene.a + i) % count], newest[(gene.b + j) % count]
                if gene.line not in _WRITING or self._may_write(a, b):
                    yield a, b

    def _may_write(self, a: str, b: str) -> bool:
        """Whether Thunder can trace a write of ``b`` to ``a``: it converts nothing."""
        x, y = (eval(name, self.spaces[0]) for name in (a, b))
        return x.dtype.is_floating_point and x.dtype == y.dtype

    def _runs(self, line: str) -> bool:
        code = compile(line, "<line>", "exec")
        for space in self.spaces:
            before = set(space)
            try:
                exec(code, space)
                ok = all(_is_sane(value) for name, value in space.items() if name not in before)
            except Exception:
                ok = False
            if not ok:
                return False
        return True


def _is_sane(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() <= 256 and value.dim() <= 4 and bool(torch.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)


def program(inputs: int, genes: Sequence[Gene], picks: Sequence[int], scope: dict[str, Any]) -> Program:
    """The program that these genes make. ``picks`` say what it returns, the newest values first."""
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        torch.manual_seed(0)
        run = _DryRun(inputs, scope)
        for gene in genes:
            run.add(gene)
    candidates = [*run.values[::-1], *run.numbers]
    is_pure = not any(mark in line for line in run.lines for mark in _IMPURE)
    outputs = tuple(candidates[pick % len(candidates)] for pick in picks)
    return Program(inputs, tuple(run.lines), outputs, is_pure)


# -------------------------------------------------------------------------------------------------------- call patterns

LAYOUTS = ("dense", "transposed", "offset", "strided", "expanded", "previous", "output", "parameter")


@dataclass(frozen=True)
class Variant:
    """What Thunder compiles a program anew for.

    Attributes:
        rows: of each input.
        grad: ``"grad"``, ``"no_grad"`` or ``"inference"``.
        training: the module's mode.
        autocast: to bfloat16.
        leaves: whether inputs require grad, each.
        shares: of each input but the first, how it shares memory with the first: ``""``, ``"same"`` or ``"overlap"``.
    """

    rows: int = ROWS[0]
    grad: str = "grad"
    training: bool = True
    autocast: bool = False
    leaves: tuple[bool, ...] = (False, False, False)
    shares: tuple[str, ...] = ("", "", "")


@dataclass(frozen=True)
class Call:
    """Calls the module, and holds what it returns."""

    variant: int = 0
    layouts: tuple[str, ...] = ("dense", "dense", "dense")
    seed: int = 0
    thread: bool = False


@dataclass(frozen=True)
class Backward:
    """Runs a backward through a call of the pattern; 0 is the newest."""

    call: int = 0
    how: str = "sum"
    retain: bool = False
    thread: bool = False


BACKWARDS = ("sum", "one", "explicit", "expanded", "grad", "create_graph", "hooked")


@dataclass(frozen=True)
class Drop:
    """Lets go of a call's outputs."""

    call: int = 0


@dataclass(frozen=True)
class Write:
    """Writes in place, without autograd, to something within the user's reach."""

    what: str = "output"
    index: int = 0
    call: int = 0


WRITTEN = ("output", "input", "gradient", "parameter", "buffer", "kept")


@dataclass(frozen=True)
class Move:
    """Puts another tensor in a parameter's or a buffer's place."""

    how: str = "data"
    index: int = 0


MOVES = ("data", "strided", "transposed", "load_state_dict", "buffer", "replace")


@dataclass(frozen=True)
class Optimize:
    """A step along the gradients, which are then dropped, held or zeroed."""

    gradients: str = "dropped"


@dataclass(frozen=True)
class Flip:
    """Flips a switch: the way back is another flip, or the pattern's end."""

    what: str = "flaky"


FLIPS = ("flaky", "requires_grad", "attribute", "hook", "deterministic")


@dataclass(frozen=True)
class Draw:
    """Draws from the generator between calls."""


@dataclass(frozen=True)
class Threads:
    """Calls, each with gradients, from several threads at once."""

    variant: int = 0
    layouts: tuple[str, ...] = ("dense", "dense", "dense")
    seed: int = 0


Step = Call | Backward | Drop | Write | Move | Optimize | Flip | Draw | Threads
Pattern = tuple[Step, ...]


@dataclass(frozen=True)
class Example:
    """One program, what it is compiled for, and patterns that run one after another on the one compiled module.

    Attributes:
        deny: operators that stay eager beside the graphs.
    """

    program: Program
    variants: tuple[Variant, ...]
    patterns: tuple[Pattern, ...]
    deny: tuple[str, ...] = ()
