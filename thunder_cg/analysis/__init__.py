"""From a Thunder trace to a plan: pure functions over frozen records, without CUDA and without state.

In comes a trace, after Thunder's optimization. `ops.read` turns it into records: an `Op` for each bound symbol, a
`Value` for each proxy. This is the only module here that knows Thunder. `aliasing.Aliasing` says which values may
share memory, what each op reads and writes, and which ops have effects whose order counts. `classify.classify` gives
each op a verdict, captured or eager, with a reason; it asks `rules`, which has one record for each operator.
`partition.partition` orders the ops into the fewest regions that their `dependencies` allow. `region_io.region_io`
says for each region what it gets and gives. `collectives.schedule_collectives` comes before all of that: it moves
collectives and their waits in the trace. Out go the verdicts, the plan and one `RegionIO` for each region. Nothing here
keeps anything between two traces: the transform owns the results and passes them on.
"""
