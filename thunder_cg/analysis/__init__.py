"""From a Thunder trace to a plan: pure functions over frozen records, without CUDA and without state.

`ops.read` turns an optimized trace into records: an `Op` for each bound symbol, a `Value` for each proxy.
`aliasing.Aliasing` says which values may share memory, what each op reads and writes, and which ops have effects whose
order counts. `classify.classify` gives each op a verdict, captured or eager, with a reason; it asks `rules`, which has
one record for each operator. `partition.partition` orders the ops into the fewest regions that their dependencies
allow. `region_io.region_io` says for each region what it gets and gives. Nothing here keeps anything between two
traces: the transform owns the results and passes them on.
"""
