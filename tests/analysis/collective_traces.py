"""Has the traces of ddp and fsdp before and after their collectives are scheduled, as a rank of a group that is not
there: nothing communicates."""

from __future__ import annotations

import json
import sys

import thunder
import thunder.distributed
import torch
from thunder.core.transform_common import Transform
from torch.testing._internal.distributed.fake_pg import FakeStore

from thunder_cg.analysis import coalescing
from thunder_cg.analysis.collectives import schedule_collectives
from thunder_cg.analysis.ops import read


class Schedules(Transform):
    def __init__(self):
        self.found = []

    def transform_trace_post_optimization(self, trace, **kwargs):
        new = schedule_collectives(trace)
        found = {"before": symbols(trace), "after": symbols(new)}
        found |= {"copies before": copies(trace), "copies after": copies(new)}
        self.found.append({**found, "peak before": peak(trace), "peak after": peak(new)})
        return new


def symbols(trace):
    return [
        (s.sym.name.removeprefix("python_"), names(s.flat_proxy_args), names(s.flat_proxy_outs))
        for s in trace.bound_symbols
    ]


def copies(trace):
    """How many all-reduces copy what they are given."""
    return sum("all_reduce" in s.sym.name and s.args[-1] is False for s in trace.bound_symbols)


def names(proxies):
    return list(dict.fromkeys(proxy.name for proxy in proxies))


def peak(trace):
    """The most bytes of values that are alive at once."""
    values = read(trace).values
    alive, most = set(), 0
    for name, inputs, outputs in symbols(trace):
        alive = alive - set(inputs) if name == "del" else alive | {*inputs, *outputs}
        most = max(most, sum(values[value].nbytes for value in alive if value in values))
    return most


def model():
    layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)]
    return torch.nn.Sequential(*layers)


def run(rank):
    torch.distributed.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    found, coalesced = {}, coalescing._COALESCED
    for name in ("ddp", "ddp, each launched by itself", "fsdp"):
        coalescing._COALESCED = 0 if "by itself" in name else 2**23
        schedules = Schedules()
        compiled = thunder.jit(model(), transforms=[schedules])
        if name.startswith("ddp"):
            compiled = thunder.distributed.ddp(compiled)
        else:
            compiled = thunder.distributed.fsdp(compiled, device=torch.device("cpu"))
        compiled(torch.randn(4, 8, requires_grad=True)).sum().backward()
        found[name] = schedules.found
    coalescing._COALESCED = coalesced
    torch.distributed.destroy_process_group()
    return json.loads(json.dumps(found))


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
