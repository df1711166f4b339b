"""The short way from a call of a compiled module to its graphs, around Thunder's dispatch.

Thunder's dispatch, prologue and autograd bridge cost several times what launching a graph does. A call whose guards
hold goes from the module straight to the recording; any other takes Thunder's way. The guards are Thunder's and the
recording's, cheaper but none fewer.
"""
