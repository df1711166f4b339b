"""The benchmark: models under eager PyTorch, Thunder, Thunder's own CUDA graphs, this package and torch.compile.

The lower bound is a hand-made CUDA graph of the model's eager kernels, with nothing around its replay. One process
measures all variants of a model in turns, so that all of them see the same machine. Only ratios within one run count.

What comes in: the models of :mod:`cases`. What goes out: rows and points in a result file, tables, and plots.
``python -m thunder_cg bench`` runs :mod:`command`, and a wheel has all of this package.

With ``--gpus N``, :mod:`rank_run` starts a process for each rank; together they measure the :mod:`rank_cases` in turns
(:mod:`distributed`), each under the variants of :mod:`parallel`, with a result file of their own kind.
"""
