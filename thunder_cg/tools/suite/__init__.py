"""The model suite: models of transformers, torchvision and timm, with random weights.

It counts what is captured of a forward, of training steps and of a decoded token, says what is not captured and why,
compares the results bit for bit with uncaptured Thunder, and on a GPU times a step.

What comes in: the models of :mod:`models`. What goes out: a result file, and its table in RESULTS.md beside it. Each
row is measured in a worker process, which owns the model; :mod:`catalogue` keeps the rows of all models in one file.
``python -m thunder_cg.tools.suite`` runs it, from the repository only.
"""
