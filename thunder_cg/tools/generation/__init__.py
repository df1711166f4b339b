"""Tokens per second of language models, from the prompt to the last token, in the ways that people run them.

What comes in: the models of :mod:`models`, with random weights. What goes out: a result file, and its table in
RESULTS.md beside it. The variants of a model take turns in a process of its own; models are prepared beside each other,
and timed one by one. ``python -m thunder_cg.tools.generation`` runs it, from the repository only.
"""
