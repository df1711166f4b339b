"""Questions that `explain` does not answer: what would be captured, which op captures wrongly, what a graph looks like.

What comes in: a function or module, compiled or not, and its inputs. What goes out: a `PlanReport`, a `Bisection`, or a
file that shows a graph. `planning` compiles and runs nothing; `bisection` compiles anew and verifies each replay, so
neither changes what it was given; `pictures` draws a graph that is there. Who owns what: what is compiled here belongs
to the call and goes with it.
"""
