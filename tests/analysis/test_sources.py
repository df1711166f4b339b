"""Lines are the user's: those of generated code lead to the code that it was generated from."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import thunder
import torch

from thunder_cg.analysis import sources
from thunder_cg.analysis.sources import SourceLine, called_from, described, line_behind, user_frames
from thunder_cg.compat.torch_compile import stacks_of_generated_code
from thunder_cg.tools import demo

TORCH, THUNDER = (os.path.dirname(str(module.__file__)) for module in (torch, thunder))
STACK = f"""
  File "/home/me/train.py", line 7, in step
    loss = model(x)
  File "/home/me/model.py", line 38, in forward
    return self.proj(x)
  File "{TORCH}/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
"""


def test_the_innermost_line_that_is_not_torchs():
    frames = user_frames(STACK)
    assert frames == [SourceLine("/home/me/train.py", 7), SourceLine("/home/me/model.py", 38)]
    assert called_from(frames) == "model.py:38, called from train.py:7"
    assert user_frames(None) == [] and called_from([]) is None


@pytest.mark.parametrize(
    ("file", "found"),
    [
        ("model.py", SourceLine("model.py", 5)),
        ("<eval_with_key>.40", SourceLine("/home/me/model.py", 38)),
        ("<eval_with_key>.41", None),
        (f"{THUNDER}/torch/__init__.py", None),
    ],
)
def test_a_line_of_generated_code_is_what_it_was_generated_from(file, found):
    assert line_behind(file, 5, {("<eval_with_key>.40", 5): STACK}) == found


def test_a_cell_of_a_notebook_has_the_name_that_the_notebook_shows(monkeypatch):
    def named(file):
        return ("Cell", "In[5]") if file == "/tmp/ipykernel_7/63904050.py" else None

    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=named))  # of an InteractiveShell
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert str(SourceLine("/tmp/ipykernel_7/63904050.py", 2)) == "In[5]:2"
    assert str(SourceLine("/home/me/model.py", 2)) == "model.py:2"


def test_the_text_of_a_line():
    line = SourceLine(__file__, 3)
    assert line.text == "from __future__ import annotations" and str(line) == "test_sources.py:3"
    assert SourceLine("/nowhere.py", 1).text is None


def test_stacks_of_an_fx_graph_are_by_the_lines_of_its_code():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first, second = graph.call_function(torch.relu, (x,)), graph.call_function(torch.tanh, (x,))
    first.meta["stack_trace"], second.meta["stack_trace"] = "first", "second"
    graph.output((first, second))
    module = torch.fx.GraphModule({}, graph)
    outer = torch.fx.GraphModule({"inner": module}, _calling_inner())
    for whole, inner in ((module, module), (outer, outer.inner)):
        stacks, code = stacks_of_generated_code(whole), type(inner).forward.__code__
        (one, other) = sorted(stacks)
        assert {one[0], other[0]} == {code.co_filename} and [stacks[one], stacks[other]] == ["first", "second"]
        assert code.co_firstlineno < one[1] < other[1]
    assert stacks_of_generated_code(torch.nn.Linear(1, 1)) == stacks_of_generated_code(torch.relu) == {}


def _calling_inner() -> torch.fx.Graph:
    graph = torch.fx.Graph()
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    return graph


def test_an_error_is_described_by_the_users_line():
    def fails():
        raise ValueError("too big. And more")

    def fails_while_tracing():
        try:
            fails()
        except ValueError as error:
            raise RuntimeError("while tracing") from error

    line = f"test_sources.py:{fails.__code__.co_firstlineno + 1}"
    with pytest.raises(ValueError, match="too big") as raised:
        fails()
    assert described(raised.value) == f"ValueError at {line}: too big"
    with pytest.raises(RuntimeError, match="tracing") as caused:
        fails_while_tracing()
    assert described(caused.value) == f"ValueError at {line}: too big"  # what it comes from
    assert described(KeyError()) == "KeyError: no message"
    assert described(TypeError(f"no gradient of {torch.detach}")) == "TypeError: no gradient of detach"
    assert not SourceLine(sources.__file__, 1).is_users and SourceLine(demo.__file__, 1).is_users


def test_a_model_of_thunders_own_has_its_lines(transform):
    """As those of its tests, which are in its package."""
    file, found = os.path.join(os.path.dirname(thunder.__file__), "tests", "a_model.py"), {}
    exec(compile("def model(x):\n    return x.tanh()", file, "exec"), found)
    jitted = thunder.jit(found["model"], transforms=[transform()])
    jitted(torch.ones(2))
    (symbol,) = (s for s in thunder.last_traces(jitted)[0].bound_symbols if s.sym.name == "tanh")
    assert (symbol.source_filename, symbol.source_positions.lineno) == (file, 2)
