"""Fast paths from a call of a compiled module to its graphs, around Thunder's dispatch.

Thunder's dispatch, prologue and autograd bridge cost several times what launching a graph does. So the transform puts a
`Dispatch` in the place of the module's forward. What comes in are the arguments of a call; what goes out is what
Thunder's dispatch would have returned. A call whose guards hold goes straight to a recording. Every other call takes
Thunder's dispatch, and then fast paths are made for what it recorded. The guards are Thunder's and the recording's,
cheaper but none fewer.

Who owns what: the module owns its `Dispatch`, which owns the fast paths of each cache entry, which own recordings. None
of them owns the module, nor its parameters past the next change of the module.
"""
