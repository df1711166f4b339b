"""What the caller does with a compiled function that its calls cannot see, and what the report says of it."""

from __future__ import annotations

import pytest
import thunder
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from thunder_cg import explain, plan
from thunder_cg.errors import FunctionalCallError


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.first(x) + self.shift


@pytest.fixture
def jitted(transform, device):
    jitted = thunder.jit(Scaled().to(device).requires_grad_(False), transforms=[transform()])
    for _ in range(3):
        jitted(torch.ones(2, 4, device=device))
    assert explain(jitted).differs == ()
    return jitted


def test_attributes_of_the_compiled_module_and_new_parts_of_the_model(jitted, device, caplog):
    jitted.shift, jitted.unrelated = torch.zeros(4, device=device), 3
    for _ in range(2):  # one warning of each
        jitted._model.layers.append(nn.Linear(4, 4).to(device))
        jitted.first.weight = nn.Parameter(torch.zeros(4, 4, device=device))
        if len(jitted._model.layers) > 2:
            del jitted._model.layers[2]
    jitted.first.weight = jitted.first.weight
    attribute, layer, weight = explain(jitted).differs
    warnings = [record.getMessage() for record in caplog.records]
    assert [layer, weight, layer.replace("layers.1", "layers.2")] == warnings
    assert attribute.startswith("Scaled.shift was set on the compiled module, whose calls do not see it, or raise; ")
    assert layer.startswith("Scaled.layers.1 was added, removed or replaced after thunder.jit compiled the Scaled")
    assert weight.startswith("Scaled.first.weight was added, removed or replaced")
    del jitted.shift, jitted._model.layers[1]
    assert explain(jitted).differs == (weight,)


def test_a_buffer_that_is_replaced(jitted, device, caplog):
    model, x = jitted._model, torch.ones(2, 4, device=device)
    before = jitted(x)
    model.shift = torch.zeros(4, device=device)
    assert torch.equal(jitted(x), before)
    (said,) = explain(jitted).differs
    assert said.startswith("Scaled.shift was added, removed or replaced") and caplog.messages == [said]
    jitted.get_buffer("shift").copy_(model.shift)
    torch.testing.assert_close(jitted(x), model(x))


def test_a_parameter_that_is_taken_off_and_put_back(jitted, caplog):
    """As PyTorch's FSDP, around a compiled module, does in each call."""
    part = jitted._model.first
    weight = part.weight
    del part.weight
    part.weight = weight
    assert not caplog.messages and explain(jitted).differs == ()


def test_hooks_that_come_after_the_first_call(jitted, device):
    calls = []
    handle = jitted._model.layers[0].register_forward_hook(lambda *args: calls.append(1))
    jitted(torch.ones(2, 4, device=device))
    (said,) = explain(jitted).differs
    assert calls == [] and said.startswith("Scaled.layers.0._forward_hooks was added, removed or replaced after")
    handle.remove()
    assert explain(jitted).differs == ()


def test_a_part_that_comes_before_the_first_call_is_seen(transform, device, caplog):
    """Thunder takes parameters when it compiles, and reads the list of layers at the first call."""
    model = Scaled().to(device).requires_grad_(False)
    jitted, x = thunder.jit(model, transforms=[transform()]), torch.ones(2, 4, device=device)
    model.layers.append(nn.Linear(4, 4).to(device).requires_grad_(False))
    assert torch.equal(jitted(x), model(x)) and explain(jitted).differs == ()
    assert not [each for each in caplog.records if "was added" in each.getMessage()]


def test_transforms_of_torch_func(jitted, device):
    x = torch.ones(2, 4, device=device)
    with pytest.raises(FunctionalCallError, match=r"the Scaled that thunder\.jit compiled keeps .* thunder_cg.thunder"):
        functional_call(jitted, {"first.weight": torch.zeros(4, 4, device=device)}, (x,))
    with pytest.raises(FunctionalCallError):
        functional_call(nn.Sequential(jitted), {"0.first.weight": torch.zeros(4, 4, device=device)}, (x,))
    outer = nn.Sequential(jitted, nn.Linear(4, 4)).to(device)
    functional_call(outer, {"1.weight": torch.zeros(4, 4, device=device)}, (x,))
    plain = thunder.jit(nn.Sequential(nn.Linear(4, 4)))
    plain(torch.ones(2, 4))
    functional_call(plain, {"0.weight": torch.zeros(4, 4)}, (torch.ones(2, 4),))
    for transformed in (vmap(jitted), grad(lambda x: jitted(x).sum())):
        with pytest.raises(NotImplementedError) as raised:
            transformed(x)
        notes = getattr(raised.value, "__notes__", ["for torch.func, such as vmap or grad, compile the function that"])
        assert notes[0].startswith("for torch.func, such as vmap or grad, compile the function that")
    assert "for torch.func, such as vmap" in " ".join(str(plan(lambda x: vmap(torch.sin)(x), x)).split())


def test_dynamo_compiles_what_makes_modules_while_a_compiled_one_goes(transform, device):
    """A guard of Dynamo's on the models that are watched would raise, as one of them is gone when it is made."""
    compiled = [thunder.jit(nn.Linear(4, 4).to(device), transforms=[transform()])]
    x = torch.ones(2, 4, device=device)
    compiled[0](x)

    def backend(graph, inputs):
        compiled.clear()
        return graph.forward

    torch._dynamo.reset()
    made = torch.compile(lambda x: nn.Sequential(nn.Identity(), nn.ReLU())(-x), backend=backend)
    assert torch.equal(made(x), torch.zeros_like(x))
    assert not compiled
