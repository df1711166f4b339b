"""The run time: what a call of an emitted trace does. The only place with state.

What comes in: a plan, as `RegionIO` records and the Python functions of its regions, and then the tensors of each call.
What goes out: the results of a call, from a replay, a capture or an eager run, and counts for the report.

The walks of ARCHITECTURE.md go through a call step by step.

Who owns what: Thunder's cache entry owns a `Program`. A forward and its backward own one `Pair`, which owns the
recordings of both. A `Recording` owns its graphs and keeps its arena alive; a `Call` holds the arena while it runs.
Note [Who owns a recording's memory] in :mod:`call` says the rest. :mod:`cuda` and :mod:`tape` are the
backends, which know nothing of all that.
"""
