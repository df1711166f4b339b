"""Runs an example on uncaptured Thunder and on thunder_cg, a step at a time, and compares all that a user can see."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import thunder
import torch
from language import (
    WIDTH,
    Backward,
    Call,
    Draw,
    Drop,
    Example,
    Flip,
    Move,
    Optimize,
    Pattern,
    Step,
    Threads,
    Variant,
    Write,
)
from operators import Effects, Flaky, Operators, current
from support import on_threads
from thunder.core.transform_common import Transform
from torch import nn

_MAX_COMPILED = 10  # cache entries of Thunder's for one program: past it, nothing new is compiled


class Mismatch(AssertionError):
    """The two worlds differ."""


class ThunderIsWrong(Exception):
    """Uncaptured Thunder does what no program can have asked for, so there is nothing to compare with."""


class OnlyThunderRaises(Exception):
    """A write to an output makes a later step fail without graphs alone, and with them that step is right.

    Either a backward needs the output, and with graphs it does not. Or the output is a view of what nobody can reach,
    whose gradient PyTorch does not know after a write, and with graphs it is no view.
    """


class Made:
    """One call of a pattern: what went in, and what came out."""

    def __init__(self, variant: int, inputs: list[torch.Tensor]) -> None:
        self.variant = variant
        self.inputs = inputs
        self.outputs: tuple[Any, ...] = ()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [output for output in self.outputs if isinstance(output, torch.Tensor)]


class World:
    """A compiled module, and all that its user holds."""

    def __init__(self, module: nn.Module, example: Example, device: str, executors: Any, transforms: Any) -> None:
        self.module = thunder.jit(module, executors=executors, transforms=transforms)
        self.original = module
        self.example = example
        self.device = device
        self.effects = Effects()
        self.reset()

    def reset(self) -> None:
        """Lets go of everything, and puts switches back: a new pattern begins."""
        self.made: list[Made] = []
        self.held: list[torch.Tensor] = []
        self.hooks: list[Any] = []
        self.effects.clear()

    @property
    def compiled(self) -> int:
        return len(self.module._lc_cs.interpreter_cache)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for _, p in self.module.named_parameters()]

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [b for _, b in self.module.named_buffers()]

    def reachable(self) -> list[torch.Tensor]:
        """Every tensor that the user can reach, in the same order in both worlds."""
        found = self.not_gradients()
        found += [t.grad for t in found if _autograd(t)[1] is True and t.grad is not None]
        return [*found, *self.held, *self.effects.kept]

    def not_gradients(self) -> list[torch.Tensor]:
        """The first of them: what no backward may write."""
        found = [*self.parameters, *self.buffers]
        for made in self.made:
            found += [*made.inputs, *made.tensors]
        return found

    def take(self, step: Step) -> str:
        """Takes a step. Returns the name of what it raises, or nothing."""
        current.effects, self.error = self.effects, None
        try:
            getattr(self, "_" + type(step).__name__.lower())(step)
        except Mismatch:
            raise
        except Exception as error:
            self.error = error
            return type(error).__name__
        return ""

    # Steps

    def _call(self, step: Call) -> None:
        variant = self.example.variants[step.variant % len(self.example.variants)]
        made = Made(step.variant % len(self.example.variants), self._inputs(variant, step.layouts, step.seed))
        self.original.train(variant.training)
        self.made.append(made)
        torch.manual_seed(step.seed)
        made.outputs = self._in_thread(step.thread, lambda: self._run(variant, made.inputs))

    def _run(self, variant: Variant, inputs: Sequence[torch.Tensor]) -> Any:
        with ExitStack() as stack:
            if variant.grad == "no_grad":
                stack.enter_context(torch.no_grad())
            elif variant.grad == "inference":
                stack.enter_context(torch.inference_mode())
            if variant.autocast:
                stack.enter_context(torch.autocast(self.device, torch.bfloat16))
            return self.module(*inputs)

    def _in_thread(self, thread: bool, work: Callable[[], Any]) -> Any:
        if not thread:
            return work()
        results: list[Any] = []
        on_threads(lambda: results.append(work()))
        return results[0]

    def _inputs(self, variant: Variant, layouts: Sequence[str], seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs: list[torch.Tensor] = []
        for i in range(self.example.program.inputs):
            share = variant.shares[i] if i else ""
            layout = layouts[i]
            if share == "same":
                inputs.append(inputs[0])
                continue
            if share == "overlap":
                base = inputs[0].detach()
                inputs.append(base.as_strided(base.size(), base.stride(), base.storage_offset()))
                continue
            memory = (torch.rand(128, generator=generator) * 2 - 1).to(self.device)
            tensor = self._laid_out(layout, memory, variant, i)
            inputs.append(tensor)
            if variant.leaves[i] != tensor.requires_grad:
                inputs[-1] = tensor.detach().requires_grad_(variant.leaves[i])
        return inputs

    def _laid_out(self, layout: str, memory: torch.Tensor, variant: Variant, i: int) -> torch.Tensor:
        size = (variant.rows, WIDTH)
        if layout in ("previous", "output"):
            for made in reversed(self.made):
                for tensor in made.inputs[i : i + 1] if layout == "previous" else made.tensors:
                    if tensor.shape == size and tensor.dtype == torch.float32 and not tensor.is_inference():
                        return tensor
        if layout == "parameter" and self.parameters and variant.rows <= WIDTH:
            for parameter in self.parameters:
                if parameter.shape == (WIDTH, WIDTH):
                    return parameter.detach()[: variant.rows]
        match layout:
            case "transposed":
                return memory[: variant.rows * WIDTH].view(WIDTH, variant.rows).t()
            case "offset" if self.device == "cpu" or not self._attends():  # pytorch/pytorch#183484
                return memory[1 : 1 + variant.rows * WIDTH].view(size)
            case "strided":
                return memory[: 2 * variant.rows * WIDTH].view(variant.rows, 2 * WIDTH)[:, ::2]
            case "expanded":
                return memory[:WIDTH].expand(size)
        return memory[: variant.rows * WIDTH].view(size).clone()

    def _attends(self) -> bool:
        return any("scaled_dot_product_attention" in line for line in self.example.program.lines)

    def _chosen(self, back: int) -> Made | None:
        return self.made[-1 - back % len(self.made)] if self.made else None

    def _backward(self, step: Backward) -> None:
        made = self._chosen(step.call)
        if made is None:
            return
        outputs = [t for t in made.tensors if t.requires_grad]
        if outputs:
            self._in_thread(step.thread, lambda: self._gradients(step, made, outputs))

    def _gradients(self, step: Backward, made: Made, outputs: list[torch.Tensor]) -> None:
        retain = step.retain
        if step.how == "one":
            outputs[-1].float().square().sum().backward(retain_graph=retain)
        elif step.how == "explicit":
            torch.autograd.backward(outputs, [torch.full_like(o, 0.5) for o in outputs], retain_graph=retain)
        elif step.how == "expanded":
            grads = [torch.ones((), dtype=o.dtype, device=o.device).expand_as(o) for o in outputs]
            torch.autograd.backward(outputs, grads, retain_graph=retain)
        else:
            loss = sum((o.float().square().sum() for o in outputs), torch.zeros((), device=self.device))
            leaves = [t for t in (*self.parameters, *made.inputs) if t.requires_grad]
            if step.how == "grad":
                found = torch.autograd.grad(loss, leaves[:3], retain_graph=retain, allow_unused=True)
                self.held += [g for g in found if g is not None]
            elif step.how == "create_graph":
                loss.backward(create_graph=True)
            elif step.how == "hooked":
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                    loss.backward(retain_graph=retain)
            else:
                loss.backward(retain_graph=retain)

    def _drop(self, step: Drop) -> None:
        made = self._chosen(step.call)
        if made is not None:
            made.outputs = ()

    def _write(self, step: Write) -> None:
        made = self._chosen(step.call)
        everything = {
            "output": made.tensors if made else [],
            "input": made.inputs if made else [],
            "gradient": [p.grad for p in self.parameters if p.grad is not None],
            "parameter": self.parameters,
            "buffer": self.buffers,
            "kept": [*self.held, *self.effects.kept],
        }[step.what]
        if everything:
            target = everything[step.index % len(everything)]
            with torch.inference_mode(target.is_inference()), torch.no_grad():
                target.copy_(torch.full_like(target, 0.25) if target.dtype is torch.bool else target * 0.5)

    def _move(self, step: Move) -> None:
        parameters = self.parameters
        if step.how == "load_state_dict":
            self.module.load_state_dict({k: v.clone() * 0.5 for k, v in self.module.state_dict().items()})
        elif step.how == "buffer" and self.buffers:
            buffer = self.buffers[step.index % len(self.buffers)]
            with torch.inference_mode(buffer.is_inference()):  # else PyTorch takes it for neither kind afterwards
                buffer.data = buffer.data.clone() + 1
        elif parameters:
            parameter = parameters[step.index % len(parameters)]
            data = parameter.data
            if step.how == "data":
                parameter.data = data.clone() * 0.5
            elif step.how == "strided":
                parameter.data = torch.stack([data, data], -1)[..., 0]
            elif step.how == "transposed" and data.dim() == 2:
                parameter.data = data.t()
            elif step.how == "replace":
                names = [name for name, _ in self.module.named_parameters()]
                new = nn.Parameter(data.clone() * 0.5, parameter.requires_grad)
                self.module._overrides_parameters[names[step.index % len(names)]] = new

    def _optimize(self, step: Optimize) -> None:
        parameters = [p for p in self.parameters if p.grad is not None]
        with torch.no_grad():
            for p in parameters:
                p -= 0.01 * p.grad.clamp(-1, 1)
        for p in parameters:
            if step.gradients == "held":
                self.held.append(p.grad)
            if step.gradients == "zeroed":
                p.grad = p.grad.detach()
                p.grad.zero_()
            elif step.gradients != "kept":
                p.grad = None

    def _flip(self, step: Flip) -> None:
        if step.what == "flaky":
            self.effects.broken = not self.effects.broken
        elif step.what == "attribute" and hasattr(self.original, "k"):
            self.original.k = 5 - self.original.k
        elif step.what == "requires_grad" and self.parameters:
            self.parameters[0].requires_grad_(not self.parameters[0].requires_grad)
        elif step.what == "hook" and self.parameters:
            self.hooks.append(self.parameters[0].register_hook(lambda g: g * 0.5))
        elif step.what == "deterministic":
            torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled(), warn_only=True)

    def _draw(self, step: Draw) -> None:
        self.held.append(torch.rand(2, device=self.device))

    def _threads(self, step: Threads) -> None:
        variant = self.example.variants[step.variant % len(self.example.variants)]
        if not self.example.program.is_pure:
            return
        self.original.train(variant.training)
        batches = [self._inputs(variant, step.layouts, step.seed + i) for i in range(3)]
        # Threads that go backward through the graph of one earlier call race for what it has saved, in Thunder as well.
        batches = [[t if t.is_leaf else t.detach().requires_grad_() for t in batch] for batch in batches]
        results: list[Any] = [None] * len(batches)

        def run(i: int) -> None:
            try:
                for _ in range(3):
                    made = Made(0, batches[i])
                    made.outputs = self._run(variant, batches[i])
                    outputs = [t for t in made.tensors if t.requires_grad]
                    leaves = [t for t in (*self.parameters, *batches[i]) if t.requires_grad]
                    found: tuple[Any, ...] = ()
                    if outputs and leaves:
                        loss = sum((o.float().square().sum() for o in outputs), torch.zeros((), device=self.device))
                        found = torch.autograd.grad(loss, leaves, allow_unused=True)
                    results[i] = [*made.tensors, *(g for g in found if g is not None)]
            except Exception as error:
                results[i] = error

        if variant.autocast:  # with which Thunder cannot compile on several threads at once
            run(0)
        if self.concurrent:
            workers = [threading.Thread(target=run, args=(i,)) for i in range(len(batches))]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        else:
            for i in range(len(batches)):
                run(i)
        for result in results:
            if isinstance(result, Exception):
                raise result
            self.held += result

    concurrent = False
    error: Exception | None = None


# ----------------------------------------------------------------------------------------------------------- comparison


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _kind(tensor: torch.Tensor, is_leaf: bool | None = None) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        *(_autograd(tensor) if is_leaf is None else (tensor.requires_grad, is_leaf)),
        tensor.is_inference(),
        type(tensor),
    )


def _forbidden(tensor: torch.Tensor) -> str:
    """Why PyTorch forbids to use the tensor, as it does after some writes to the base of a view; "" if it does not."""
    try:
        tensor.grad_fn  # noqa: B018
    except RuntimeError as error:
        return str(error)
    return ""


def _autograd(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Whether it requires grad, and is a leaf. Of a view that a write to its base came after, PyTorch may not say."""
    if why := _forbidden(tensor):
        return tensor.requires_grad, why.partition(" is a view ")[2]  # before that: which function made it
    return tensor.requires_grad, tensor.grad_fn is None


_AMBIGUOUS = ("A view was created in no_grad mode", "A view was created in inference mode")


def _is_ambiguous(tensor: torch.Tensor) -> bool:
    """Whether it is a view, made without grad mode, that a write to its base in grad mode came after.

    PyTorch forbids to use it. With graphs the view is made when the write is done, and may be used.
    """
    return _forbidden(tensor).startswith(_AMBIGUOUS)


def _owned(plain: Sequence[torch.Tensor], graphed: Sequence[torch.Tensor]) -> set[int]:
    """Which are views of what nobody can reach, and with graphs no views: each takes the place of its base there.

    Only one may: of two, neither would know of what is written to the other while gradients are recorded.
    """
    found: dict[int, set[int]] = {}  # by base
    for i, (a, b) in enumerate(zip(plain, graphed)):
        if a._base is not None and not b._is_view() and not any(t is a._base for t in plain):
            found.setdefault(id(a._base), set()).add(i)
    return {i for places in found.values() if len({id(plain[i]) for i in places}) == 1 for i in places}


_KIND = ["shape", "stride", "dtype", "device", "requires_grad", "grad_fn", "is_inference", "type"]


def compare_tensors(where: str, plain: Sequence[torch.Tensor], graphed: Sequence[torch.Tensor]) -> None:
    """Equal kinds and bits, and the same relations among them."""
    if len(plain) != len(graphed):
        raise Mismatch(f"{where}: {len(plain)} tensors without graphs, {len(graphed)} with them")
    owned = _owned(plain, graphed)
    for i, (a, b) in enumerate(zip(plain, graphed)):
        is_leaf = None
        if _is_ambiguous(a):
            is_leaf = _autograd(b)[1]
        elif i in owned and _forbidden(a):  # see OnlyThunderRaises
            is_leaf = not a.requires_grad
        kinds = _kind(a, is_leaf), _kind(b)
        if kinds[0] != kinds[1]:
            differ = [f"{n}: {x} != {y}" for n, x, y in zip(_KIND, *kinds) if x != y]
            raise Mismatch(f"{where}, tensor {i}: {'; '.join(differ)}")
        if not torch.equal(_bits(a), _bits(b)):
            raise Mismatch(f"{where}, tensor {i}: without graphs\n{a}\nwith graphs\n{b}")
    for what, without, with_ in (
        ("objects", _objects(plain), _objects(graphed)),
        ("memory", _memory(plain, owned), _memory(graphed, owned)),
    ):
        if without != with_:
            raise Mismatch(f"{where}: {what} shared: {without} without graphs, {with_} with them")


def _objects(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of each tensor, the first that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(t), i) for i, t in enumerate(tensors)]


def _memory(tensors: Sequence[torch.Tensor], owned: set[int]) -> list[tuple[int, int, bool]]:
    """Of each tensor, the first that shares its storage, how far from that it begins, and whether it is a view.

    A view of what nobody can reach is as good as none, and so are those that with graphs are ``owned``.
    """
    addresses = [t.untyped_storage().data_ptr() if t.numel() else 0 for t in tensors]
    sharing = Counter({id(t): at for at, t in zip(addresses, tensors)}.values())  # of distinct tensors
    first: dict[int, int] = {}
    found = []
    for i, (at, t) in enumerate(zip(addresses, tensors)):
        if not at or sharing[at] == 1:
            found.append((i, 0, False))
            continue
        j = first.setdefault(at, i)
        found.append((j, t.data_ptr() - tensors[j].data_ptr(), t._is_view() and i not in owned))
    return found


def _compare_outputs(where: str, plain: Made, graphed: Made) -> None:
    if len(plain.outputs) != len(graphed.outputs):
        raise Mismatch(f"{where}: {len(plain.outputs)} outputs without graphs, {len(graphed.outputs)} with them")
    for i, (a, b) in enumerate(zip(plain.outputs, graphed.outputs)):
        if type(a) is not type(b) or (not isinstance(a, torch.Tensor) and repr(a) != repr(b)):
            raise Mismatch(f"{where}, output {i}: {a!r} without graphs, {b!r} with them")


def _random_state(device: str) -> torch.Tensor:
    return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state()]) if device == "cuda" else torch.get_rng_state()


def _set_random_state(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


# ------------------------------------------------------------------------------------------------------------- examples


class Pair:
    """The two worlds of one example."""

    def __init__(
        self, example: Example, executors: Sequence[Any], device: str, module: nn.Module, transform: Transform
    ) -> None:
        self.example = example
        self.device = device
        other = copy.deepcopy(module)
        self.plain = World(module, example, device, executors, [])
        self.graphed = World(other, example, device, executors, [transform])
        self.graphed.concurrent = True
        self.dead: set[Any] = set()  # calls that uncaptured Thunder cannot compile
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Runs all patterns. Returns what has been counted.

        Raises:
            Mismatch: the worlds differ.
        """
        try:
            for number, pattern in enumerate(self.example.patterns):
                self._run(f"pattern {number}", pattern)
        except ThunderIsWrong as error:
            self.counts[f"given up: {error}"] += 1
        return self.counts

    def _run(self, name: str, pattern: Pattern) -> None:
        called, deterministic = self.counts["calls"], torch.are_deterministic_algorithms_enabled()
        try:
            for number, step in enumerate(pattern):
                if self._may_take(step):
                    self._step(f"{name}, step {number}, {step}", step)
            self._compare(f"{name}, at its end")
        except OnlyThunderRaises:
            self.counts["ended early: an output was written, which only Thunder minds"] += 1
        for world in (self.plain, self.graphed):
            for p in world.parameters:
                p.grad = None
                p.requires_grad_(True)
            for hook in world.hooks:
                hook.remove()
            if hasattr(world.original, "k"):
                world.original.k = 2
            world.reset()
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        self.counts["patterns"] += self.counts["calls"] > called

    def _key(self, step: Call | Threads) -> Any:
        flags = tuple(p.requires_grad for p in self.plain.parameters)
        return step.variant % len(self.example.variants), flags, getattr(self.plain.original, "k", None)

    def _may_take(self, step: Step) -> bool:
        if isinstance(step, (Call, Threads)):
            return self._key(step) not in self.dead and self.plain.compiled < _MAX_COMPILED
        return True

    def _step(self, where: str, step: Step) -> None:
        state = torch.get_rng_state(), torch.cuda.get_rng_state() if self.device == "cuda" else None
        deterministic = torch.are_deterministic_algorithms_enabled()
        versions, found, after = [], [], []
        compiled, kept = self.plain.compiled, len(self.plain.effects.kept)
        for world in (self.plain, self.graphed):
            _set_random_state(state)
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            reachable = world.reachable()
            before = [None if t.is_inference() else t._version for t in reachable]
            found.append(world.take(step))
            after.append(_random_state(self.device))
            versions.append([v is not None and t._version != v for t, v in zip(reachable, before)])
        if isinstance(step, Backward) and len(self.plain.effects.kept) > kept:
            raise ThunderIsWrong("an effect was put off to the backward")
        if isinstance(step, Backward) and any(versions[0][: len(self.plain.not_gradients())]):
            raise ThunderIsWrong("a write was put off to the backward")
        if isinstance(step, Backward) and isinstance(self.plain.error, AssertionError):
            raise ThunderIsWrong("an assertion of its own fails")
        if isinstance(step, Backward) and str(self.plain.error).startswith(_AMBIGUOUS):
            raise ThunderIsWrong("a call without gradients is connected to autograd")  # by a view older than its write
        if isinstance(step, Call) and not found[1] and str(self.plain.error).startswith("Attempting to reshape"):
            raise ThunderIsWrong("an argument is taken for another one that shares its memory")
        if not found[1] and self._is_modified(step):
            raise OnlyThunderRaises
        if isinstance(self.graphed.error, AssertionError) and self._is_modified(step):  # PyTorch's error came before it
            raise ThunderIsWrong("an assertion of its own fails")
        if found[0] != found[1]:
            errors = [
                repr(world.error) if name else "nothing" for world, name in zip((self.plain, self.graphed), found)
            ]
            raise Mismatch(f"{where}: raises {errors[0]} without graphs, {errors[1]} with them") from (
                self.graphed.error if found[1] else self.plain.error
            )
        if not torch.equal(*after):
            raise Mismatch(f"{where}: the generators are in different states")
        if versions[0] != versions[1]:
            raise Mismatch(f"{where}: versions advance for {versions[0]} without graphs, for {versions[1]} with them")
        if isinstance(step, Call):
            self._count(step, found[0], compiled)
            _compare_outputs(where, self.plain.made[-1], self.graphed.made[-1])
        if isinstance(step, (Call, Threads, Backward)):
            self._compare(where)

    def _is_modified(self, step: Step) -> bool:
        """Whether the last error of Thunder's was that an output has been written; see OnlyThunderRaises."""
        error = str(self.plain.error)
        if "is a view and its base or another view of its base has been modified" in error:
            plain, graphed = self.plain.reachable(), self.graphed.reachable()
            return any(_forbidden(plain[i]) for i in _owned(plain, graphed))
        written = any(not t.is_inference() and t._version for made in self.plain.made for t in made.tensors)
        return isinstance(step, Backward) and written and "modified by an inplace operation" in error

    def _count(self, step: Call, error: str, compiled: int) -> None:
        if error and error != Flaky.__name__ and self.plain.compiled == compiled:
            self.dead.add(self._key(step))
            self.counts["refused"] += 1
            self.counts[f"refused: {self.plain.error}"[:200]] += 1
        elif error:
            self.counts["raised"] += 1
        else:
            self.counts["calls"] += 1

    def _compare(self, where: str) -> None:
        compare_tensors(where, self.plain.reachable(), self.graphed.reachable())


def check(
    example: Example, operators: Operators, device: str, transform: Transform, module: type[nn.Module] | None = None
) -> Pair:
    """Runs the example. Returns the two worlds, for their counts.

    Args:
        example: what to run.
        operators: those of the program that are not PyTorch's.
        device: ``"cpu"`` or ``"cuda"``.
        transform: of the second world.
        module: a class to use in place of the program's, as a reproduction has it.

    Raises:
        Mismatch: the worlds differ. The message ends with a script that shows it again.
    """
    torch.manual_seed(11)
    made = example.program.module(operators.traced) if module is None else module()
    pair = Pair(example, operators.executors, device, made.to(device), transform)
    try:
        pair.run()
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        raise Mismatch(f"{error}\n\n{reproduction(example, device)}") from error
    return pair


def reproduction(example: Example, device: str) -> str:
    """The example as a script: the module's source, and the calls."""
    program, backend = example.program, "tape" if device == "cpu" else "cuda"
    variants = "".join(f"    {variant},\n" for variant in example.variants)
    patterns = "".join(
        f"    ({''.join(f'{chr(10)}        {s},' for s in steps)}\n    ),\n" for steps in example.patterns
    )
    return f"""# PYTHONPATH=.:tests:tests/programs python reproduction.py
import torch
import torch.nn.functional as F
from driver import *
from language import *
from operators import Operators
from torch import nn
from thunder_cg import cudagraph_transform

operators = Operators()
globals().update(operators.traced)  # ops, library


{program.source()}

variants = (
{variants})
patterns = (
{patterns})
example = Example(Program({program.inputs}, is_pure={program.is_pure}), variants, patterns)
check(example, operators, "{device}", cudagraph_transform(backend="{backend}", debug=True, deny={example.deny}), Module)
"""
