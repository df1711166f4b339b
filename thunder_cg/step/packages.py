"""Which source files are the user's, which an installed package's, and which of these are taken to be constant.

Note [Packages]
    Of the functions of an installed package only those are looked into that a capture has seen to run. Their code is
    taken to be constant, so of what they read only data counts: a global of their module, a registry, what a class or
    an object has. Python's library, PyTorch, Thunder and what these two use are taken to be constant as a whole, except
    for PyTorch's settings: those in C++ are compared by themselves (see `states_outside`), those that are plain values
    of its modules where a function that has run reads them (`settings_in`).
"""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from functools import cache
from glob import escape as glob_escape, glob

import thunder
import torch

from thunder_cg.compat.lines import PACKAGES


def _folders_of_packages() -> list[str]:
    """Of Python's path, those that something was installed into. That of the program itself is none."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    users = {os.getcwd(), os.path.dirname(os.path.abspath(main or ""))}
    folders = {os.path.abspath(folder) for folder in sys.path} - users
    return [folder for folder in folders if glob(os.path.join(glob_escape(folder), "*.dist-info"))]


# Where packages are installed, in this environment and those below it. Some are elsewhere, as this one may be.
_PACKAGES = (
    *PACKAGES,
    *(folder + os.sep for folder in _folders_of_packages()),
    *(sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")),
)
_CONSTANT = (
    sysconfig.get_paths()["stdlib"] + os.sep,
    *(os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep for package in (torch, thunder)),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "<frozen",
)
CONSTANT_PACKAGES = {
    *("torch", "cuda", "functorch", "mpmath", "networkx", "numpy", "opt_einsum", "sympy", "torchgen", "triton"),
    *("thunder", "thunder_cg", "nvfuser", "nvfuser_direct", "optree"),
}

_WITHOUT_FILE = CONSTANT_PACKAGES | sys.stdlib_module_names  # some of their modules are in C


def is_users(value: types.ModuleType | type) -> bool:
    """Whether a module or a class is not of an installed package."""
    file = _file_of(value)
    return file is not None and not is_installed(file)


def may_change(value: types.ModuleType | type) -> bool:
    """Whether what a module or a class defines is looked at. See Note [Packages]."""
    file = _file_of(value)
    return file is not None and not is_constant(file)


def _file_of(value: types.ModuleType | type) -> str | None:
    """The source file of a module or a class; "" for the main program, and for a module that a program has made."""
    name = value.__module__ if isinstance(value, type) else value.__name__
    module = sys.modules.get(name) if isinstance(value, type) else value
    file: str | None = "" if name == "__main__" else getattr(module, "__file__", None)
    is_made = not (hasattr(module, "__path__") or str(name).partition(".")[0] in _WITHOUT_FILE)  # no namespace package
    return "" if file is None and is_made else file


@cache
def is_installed(filename: str) -> bool:
    """Whether a source file belongs to an installed package or to the standard library."""
    return any(packages in filename for packages in _PACKAGES) or filename.startswith(_CONSTANT)


@cache
def is_constant(filename: str) -> bool:
    """Whether nothing that a source file defines is looked at: see Note [Packages]."""
    package = next((filename.rpartition(each)[2] for each in _PACKAGES if each in filename), None)
    if package is not None:
        return package.partition(os.sep)[0] in CONSTANT_PACKAGES
    return filename.startswith(_CONSTANT)
