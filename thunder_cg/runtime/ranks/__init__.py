"""What the ranks of process groups agree on, through the store of each group, before graphs hold their collectives.

The groups come in that a program or a step communicates in, and what a rank is about to capture; what goes out is
whether all ranks are. The state of a group, with the number of its last call, is kept as long as the group:

- `groups`: ranks number the calls that communicate in a group alike, and meet in some.
- `agreement`: they vote in such a call, before a capture and after it.
- `steps`: a whole step is one of these calls.
- `same_options`: they compile with the same options.
"""
