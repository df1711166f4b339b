"""``thunderfx`` with CUDA graphs, and without cuts that nothing needs.

What comes in: a function or module of the user's. Dynamo turns it into FX graphs, and Thunder's splitter gives Inductor
what Thunder does not support. It also gives away each operator that Thunder only calls as it is, a *fallback*, since
Inductor might fuse it. Each cut costs more than that: the pieces have graphs, memory and checks of their own. What goes
out: the same, with as few cuts as possible. A compiled function owns all that is made for it; nothing else changes.

- ``compiler``: `thunderfx`, and what it gives Dynamo as a backend.
- ``fallbacks``: which fallbacks are left to Inductor nevertheless, and why.
- ``rewrites``: what is written differently in a graph of Dynamo's, so that Thunder can trace it.
- ``operators``: operators of PyTorch that Thunder has no symbol for, or one that takes fewer arguments.

Nothing of it is imported before `thunderfx` is called: Dynamo takes long to import.
"""
