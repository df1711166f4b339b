"""Questions that `explain` does not answer: what would be captured, and which op captures wrongly.

What comes in: a function or module, compiled or not, and its inputs. What goes out: a `PlanReport` or a `Bisection`.
`planning` compiles and runs nothing; `bisection` compiles anew and verifies each replay, so neither changes what it was
given. Who owns what: what is compiled here belongs to the call and goes with it.
"""
