"""How an attempt to take the fast path, or to make one, may end."""

MISS = object()
"""What a fast path returns that is not for the call. It has done nothing that anybody can see."""


class Unsupported(Exception):
    """Calls of the cache entry keep to Thunder's dispatch, for the reason that the message gives."""


class GuardMismatch(Exception):
    """The call from which a fast path was to be made is not one that the cache entry, or the recording, is for."""
