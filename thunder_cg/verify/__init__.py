"""Verification: a replay beside an eager run of the same region on the same inputs, compared bit for bit.

What comes in: a region while it is recorded, and later its graph and the arguments of a call. What goes out: an
`Outcome`. The recorded graph keeps the `Check`; a `Trial` lives for one comparison. The run time imports
none of this. One comparison, step by step:

1.  While the region is recorded, a second graph of the same ops is recorded, which returns hashes of the values of each
    op (:mod:`hashes`).
2.  A `Trial` copies what the region or its graph writes, and notes the state of the generator (:mod:`trial`).
3.  The ops run, on copies of what they write. Then the graph runs, from the same state, on the call's own inputs.
4.  If all is the same bit for bit, the call gets the results of the replay (:mod:`compare`).
5.  If not, both sides run a few times more, and the differences are judged. See Note [Tolerated differences].
6.  If a difference is none of those, the value hashes tell the first op whose value differs (:mod:`verifier`). The call
    gets what the ops made.
"""

from thunder_cg.verify.verifier import ReplayVerifier

__all__ = ["ReplayVerifier"]
