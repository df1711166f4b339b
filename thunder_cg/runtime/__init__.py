"""The run time: what a call of an emitted trace does. The only place with state.

What comes in: a plan, as `RegionIO` records and the Python functions of its regions, and then the tensors of each call.
What goes out: the results of a call, from a replay, a capture or an eager run, and counts for the report.

A call, step by step:

1.  `Program.begin` looks for a recording whose `Guard` holds for the call's tensors (:mod:`program`, :mod:`guards`). If
    there is none, the call warms up, captures, or runs eagerly for a reason that is counted (:mod:`skip_reasons`).
    Which of these depends on its inputs (:mod:`program_inputs`) and on the memory budget (:mod:`budget`). With
    ``select="measured"``, a `Selection` times the first calls of a pair (:mod:`selection`; Note [Regions that pay]).
2.  The call takes an `Arena`, in whose memory everything lives that stays in graphs (:mod:`arena`).
3.  `RuntimeRegion.run` does what the call's mode says, for each region (:mod:`region`; Note [Four modes of a call]).
4.  A capture places inputs (:mod:`inputs`), records the region's function in a pool of the arena (:mod:`backend`), and
    sorts the results (:mod:`outputs`). What comes of it is a `RegionGraph` (:mod:`recording`).
5.  `Program.end_call` has the `Pair` keep what was recorded (:mod:`pair`), and releases the arena.
    `Program.end_forward` leaves the arena to the backward.

Who owns what: Thunder's cache entry owns a `Program`. A forward and its backward own one `Pair`, which owns the
recordings of both. A `Recording` owns its graphs and keeps its arena alive; a `Call` holds the arena while it runs.
Note [Who owns a recording's memory] in :mod:`call` says the rest. :mod:`cuda` and :mod:`tape` are the
backends, which know nothing of all that.
"""
