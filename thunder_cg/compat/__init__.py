"""Every private or version-dependent name of PyTorch, Thunder and the CUDA driver that the package relies on.

What comes in: the installed packages, within the ranges that :mod:`versions` checks. What goes out: functions and types
with standard names. Nothing else in the package touches a private name, so support for a new release of PyTorch or
Thunder is a change here, and ``tests/compat`` says what has to hold. Importing these modules builds and probes nothing.
What their functions return is owned by the caller.
"""
