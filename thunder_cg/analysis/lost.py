"""What the user's Python does that Thunder (0.2.6) loses: it runs Python once, while it traces, without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from thunder_cg.analysis.ops import Ops, names_in
from thunder_cg.analysis.sources import Stacks, line_behind, users
from thunder_cg.compat.compilation import Change, leftover_autocast
from thunder_cg.compat.thunder import TraceCtx, is_guess

_READ = (
    "reads a number that no operator uses, and Thunder runs Python only while it traces, without the number; to log a "
    "value, return the tensor and read it outside of the compiled function"
)
_BRANCH = (
    "depends on what a tensor holds, a number that Thunder does not know while it traces, and takes for false; choose "
    "with torch.where on a 0-dim tensor, or compile with thunder_cg.thunderfx, which leaves the branch to Python"
)
_CONSTANT = (
    "is the tensor that was there when Thunder traced, in all calls; take items out of containers one by one, as with "
    "[t for t in a] rather than a + b or [a], or compile with thunder_cg.thunderfx"
)
_UNREPEATED = {  # by the kinds of `lost_changes`
    "assignments": (
        "self.{name} at {line} is assigned while Thunder traces, and in no call; return the value, or write it into "
        "a buffer, as with self.buffer.copy_(value) (README, Inference with a KV cache), or compile with "
        "thunder_cg.thunderfx, which assigns it"
    ),
    "refused": (
        "self.{name} at {line} is assigned a tensor of another shape, dtype or device, or one that requires a "
        "gradient, as all that Thunder computes in training does, or None, and the next call raises; write into the "
        "buffer, as with self.buffer.copy_(value), or compile with thunder_cg.thunderfx, which assigns it"
    ),
    "changes": (
        "{name} at {line} changes a container of the caller's or of the module while Thunder traces, and in no call; "
        "return what is new, or write it into a tensor in place (README, Inference with a KV cache), or compile with "
        "thunder_cg.thunderfx, which changes it"
    ),
    "absent": (
        "{name} at {line} asks for an attribute of a tensor that Thunder does not have, and is told that there is "
        "none; ask for it before thunder.jit, or compile with thunder_cg.thunderfx, which asks the tensor"
    ),
    "calls": (
        "{name}() at {line} is called while Thunder traces, and in no call; {fix}, or compile with "
        "thunder_cg.thunderfx, where Python calls it"
    ),
}
_INSTEAD = {"print": "print after the call", "logging": "log after the call", "random": "draw with torch.rand"}
_HOOKS = (
    "has hooks on gradients, which Thunder does not call, or raises for; register them with Tensor.register_hook on "
    "parameters, or compile with thunder_cg.thunderfx, which calls them"
)
_ASKED = (
    "asks what Thunder does not know while it traces, and is told it of a new, contiguous tensor in no memory; do the "
    "same for all tensors, as with x.contiguous(), or compile with thunder_cg.thunderfx, which asks the tensor"
)
_OF_MEMORY = {"data_ptr", "is_conj", "is_contiguous", "is_inference", "is_neg", "is_pinned", "is_set_to", "is_shared"}
_CAST = (
    "as an earlier call under autocast did, though autocast is off now: Thunder never ends it; compile with "
    "thunder_cg.thunderfx, which does, or compile the model once more for calls without autocast"
)


def lost(trace: TraceCtx, read: Callable[[TraceCtx], Ops]) -> Iterator[str]:
    """Of a trace before Thunder transforms it: the reads whose number no operator gets, the branches on numbers, the
    questions about memory, and that autocast is on which the user has left.

    Args:
        read: reads the trace, if there is something to say.
    """
    symbols = trace.bound_symbols
    numbers = names_in([symbol.output for symbol in symbols if symbol.sym.name == "item"])
    unused = numbers - names_in([(symbol.args, symbol.kwargs) for symbol in symbols]) if numbers else frozenset()
    guesses = names_in([symbol.output for symbol in symbols if is_guess(symbol)])
    asked = names_in([symbol.output for symbol in symbols if symbol.sym.name in _OF_MEMORY])
    cast = leftover_autocast(trace)
    if not (unused or guesses or asked or cast):
        return
    ops = read(trace)
    for op in ops.ops:
        if cast is not None and op.symbol is cast[0]:
            yield f"a cast to {str(cast[1]).removeprefix('torch.')} {ops.place(op)} is made, {_CAST}"
        if not unused.isdisjoint(op.outputs):
            yield f"Tensor.item {ops.place(op)} {_READ}"
        if not guesses.isdisjoint(op.outputs):
            yield f"a branch {ops.place(op)} {_BRANCH}"
        if not asked.isdisjoint(op.outputs):
            yield f"Tensor.{op.symbol.sym.name} {ops.place(op)} {_ASKED}"


def unrepeated(found: Mapping[str, Iterable[Change]], stacks: Stacks) -> Iterator[str]:
    """What `lost_changes` has found: by kind, in no call or refused by the next one."""
    for kind, said in _UNREPEATED.items():
        for name, stack in found.get(kind, ()):
            fix = next((fix for part, fix in _INSTEAD.items() if part in name), "pass what it returns as a tensor")
            yield said.format(name=name, line=_line(stack, stacks), fix=fix)


def uncalled(modules: Iterable[str]) -> Iterator[str]:
    """Submodules whose hooks on gradients no call runs."""
    return (f"{f'self.{name}' if name else 'the module'} {_HOOKS}" for name in modules)


def constant(paths: Iterable[str]) -> Iterator[str]:
    """Results that are the same tensor in all calls."""
    return (f"the result{path} {_CONSTANT}" for path in paths)


def _line(stack: Sequence[tuple[str, int]], stacks: Stacks) -> str:
    lines = users(line for file, number in stack if (line := line_behind(file, number, stacks)) is not None)
    return str(lines[-1]) if lines else "an unknown line"
