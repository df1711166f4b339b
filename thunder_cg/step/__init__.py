"""A training iteration as one graph: :func:`graphed_step`.

What comes in: a function that runs one step, with compiled modules and optimizers in it. What goes out: a function that
runs the same step, mostly by a replay of one graph. `reads` finds in the function's bytecode what it reads from
outside, and `attributes` and `calls` see what it looks up and calls; `state` collects all that the step depends on as
facts that can be compared; `batch` does so for the arguments; `recording` captures a call and says what has to hold for
it to be replayed; `memory` says what it will need, and `fixes` what to do if it cannot be captured; `graphed` decides
for each call. A `GraphedStep` owns its recordings and their one arena. It keeps the function, and the modules and
optimizers that it was given.
"""

from thunder_cg.step.graphed import GraphedStep, graphed_step

__all__ = ["GraphedStep", "graphed_step"]
