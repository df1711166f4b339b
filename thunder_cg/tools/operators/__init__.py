"""The operator sweep: captures every operator that Thunder can trace, and compares with uncaptured Thunder.

A case is an operator, a sample is one call of it, and a draw is one set of values for a sample. A task is some samples
of a case: a worker process compiles them together, without and with the transform, and calls both with five draws. The
first draw warms up, the second captures, and three replay with fresh values. Then each symbol that the rules deny is
captured by force.

What comes in: PyTorch's table of operators and the calls of :mod:`handwritten`. What goes out: a result file, which
:mod:`check` compares with the rules. :mod:`run` owns the worker processes. ``python -m thunder_cg.tools.operators``
runs it, from the repository only.
"""
