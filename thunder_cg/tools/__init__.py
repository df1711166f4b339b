"""Commands around the package, of which the core imports none.

What comes in: the words of a command line. What goes out: text, and result files as JSON in ``results/``, with the
machine, the versions and the date. Users run :mod:`demo` and :mod:`bench`, through ``python -m thunder_cg``. Developers
run :mod:`suite` and :mod:`operators` from the repository, and a wheel has neither. Who owns what: :mod:`workers` owns
the processes in which cases are measured, so that no case sees what another one left behind, and :mod:`results` the
form of the files, which :mod:`files` writes. :mod:`arguments` is what their command lines share, and :mod:`measuring`
their measurements.
"""
