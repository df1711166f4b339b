"""Runs a training step as it is and as a graphed step, on twins of a model."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from support import same, same_state
from torch import nn

from thunder_cg import cudagraph_transform, graphed_step


class Twins:
    """Two trainings of equal models, one in Python without graphs, one with its step graphed."""

    def __init__(self, backend: str, device: str) -> None:
        self.backend, self.device = backend, device

    def compiled(self, model: nn.Module) -> nn.Module:
        return thunder.jit(model, transforms=[cudagraph_transform(backend=self.backend)])

    def model(self, *layers: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        default = nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
        return nn.Sequential(*(layers or default)).to(self.device)

    def batch(self, size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.randn(size, 4), torch.randint(0, 3, (size,))
        return x.to(self.device), y.to(self.device)

    def graphed(self, fn: Callable[..., Any], **options: Any) -> Any:
        return graphed_step(fn, backend=self.backend, **options)

    def train(
        self, make: Callable[..., Any], calls: int = 8, between: Callable[..., None] | None = None, **options: Any
    ) -> Any:
        """Trains twice and compares results, models and random numbers; returns the graphed step.

        Args:
            make: of a model without and with the transform, makes the function of a step.
            between: is called after each call with its number and the model, its step's function, and the batch.
            options: of the graphed step.
        """
        model = self.model()
        plain = _plain.pop(self.device, None) or Plain(model)
        plain.compiled.load_state_dict(model.state_dict())
        models = [plain.compiled, self.compiled(model)]
        results, states, steps = [], [], []
        for compiled, is_graphed in zip(models, (False, True)):
            torch.manual_seed(1)
            fn = make(compiled)
            step = self.graphed(fn, **options) if is_graphed else fn
            found = []
            for i in range(calls):
                batch = self.batch()
                found.append(detached(step(*batch)))
                if between is not None:
                    between(i, compiled, fn, batch)
            results.append(found)
            states.append([torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self.device == "cuda" else [])])
            steps.append(step)
        same(results[0], results[1])
        same_state(*models)
        same(states[0], states[1])
        if plain.is_as_it_was():
            _plain[self.device] = plain
        return steps[1]

    def both(self, run: Callable[..., Any]) -> Any:
        """Runs something without graphs and with them, from one seed, and compares what it finds.

        Args:
            run: takes what makes a step of a function. It returns what it finds, and the step, or the steps.

        Returns:
            the step or the steps of the second run.
        """
        results = []
        for graphed in (lambda fn: fn, self.graphed):
            torch.manual_seed(1)
            results.append(run(graphed))
        (expected, _), (found, step) = results
        same(found, expected)
        return step


class Plain:
    """A model that Thunder has compiled without graphs. Tests that leave it as it was share it, which saves time."""

    def __init__(self, model: nn.Module) -> None:
        self.compiled = thunder.jit(copy.deepcopy(model))
        self._before = self._objects(), self._tensors()

    def is_as_it_was(self) -> bool:
        """But for the values of tensors. It has no gradients then."""
        objects, tensors = self._before
        self.compiled.zero_grad()
        if not self.compiled._lc_cd.autocast_stack.is_empty():  # Thunder ends no autocast around a call
            return False
        now = self._objects()
        return len(now) == len(objects) and all(map(operator.is_, now, objects)) and self._tensors() == tensors

    def _objects(self) -> list[object]:
        """All attributes of its modules, and what is in those that are dicts, such as hooks."""
        attributes = [each for module in self.compiled.modules() for each in vars(module).values()]
        return attributes + [item for each in attributes if isinstance(each, dict) for item in each.values()]

    def _tensors(self) -> list[object]:
        names = "requires_grad", "dtype", "shape", "grad", "_backward_hooks", "_post_accumulate_grad_hooks", "__dict__"
        get = operator.attrgetter(*names)
        return [(tensor.data_ptr(), tensor.stride(), get(tensor)) for tensor in self.compiled.parameters()]


_plain: dict[str, Plain] = {}


def detached(result: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), result)


@pytest.fixture
def step_twins(backend: str, device: str) -> Twins:
    return Twins(backend, device)
