"""Has Thunder update the running statistics of an InstanceNorm, where something of ours is compiled.

Thunder (0.2.6) takes the norm apart where it has a gradient. Then it updates copies of them, one for each image, and
drops these.
"""

from __future__ import annotations

from typing import Any

from thunder.core.compile_data import _compile_data
from torch.nn import functional as F

from thunder_cg.compat.thunder import in_torchs_language, is_ours, symbols_of_functions, trace_as

_thunders = symbols_of_functions()[F.instance_norm]


@in_torchs_language
def _instance_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if use_input_stats and is_ours(_compile_data.get()[0]):
        images, axes = x.detach(), tuple(range(2, x.ndim))
        for running, of in ((running_mean, "mean"), (running_var, "var")):
            if running is not None:
                new = getattr(images.to(running.dtype), of)(axes).mean(0)
                running.copy_((1 - momentum) * running + momentum * new)
        running_mean = running_var = None
    return _thunders(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def update_statistics_of_instance_norm() -> None:
    """See the module's docstring."""
    trace_as(F.instance_norm, _instance_norm)
