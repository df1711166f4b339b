"""Command-line arguments that several tools have. Importing this module imports no torch."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from thunder_cg.progress import clear_bar

if TYPE_CHECKING:
    import torch

JOBS = max(1, (os.cpu_count() or 1) // 2)  # the default of --jobs


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, and ends the process with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help says more)\n")


@contextmanager
def without_warnings_of_others() -> Iterator[None]:
    """Inside, warnings of other packages are not printed, unless ``python -W`` says which are."""
    log = logging.getLogger("torch.utils.cpp_extension")  # which warns that there is no GPU
    level = log.level
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.filterwarnings("ignore", module=r"(?!thunder_cg\b|__main__\b)")
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(level)


_interrupts: list[int] = []  # signals that have come to a command


def interruptible(main: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit status of a command. Says in one line that the user has interrupted it."""
    handler = signal.getsignal(signal.SIGINT)
    is_usual = handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    _interrupts.clear()
    if is_usual:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        with without_warnings_of_others():
            return main(argv)
    except (KeyboardInterrupt, Exception) as error:
        if not is_interruption(error):
            raise
        print_interruption(error)
        return 130
    finally:
        if is_usual:
            signal.signal(signal.SIGINT, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _interrupts.append(number)
    raise KeyboardInterrupt


def is_interruption(error: BaseException) -> bool:
    """Whether an error ends a command because the user has interrupted it.

    Other packages make other errors of `KeyboardInterrupt`, as NumPy does while it is imported.
    """
    return isinstance(error, KeyboardInterrupt) or bool(_interrupts)


def print_interruption(error: BaseException) -> None:
    """Says in one line what has ended a command, in the place of its bar."""
    clear_bar()
    other = [] if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}".splitlines()[:1]
    print(": ".join(["interrupted", *other]), file=sys.stderr)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda if there is one, else cpu")


def add_rows(parser: argparse.ArgumentParser) -> None:
    """The arguments of a tool that measures the rows of models in processes of their own."""
    add = parser.add_argument
    add("--only", nargs="+", default=("",), metavar="TEXT", help="the models that have one of these in their names")
    add("--jobs", type=positive, default=JOBS, metavar="N", help="processes that prepare at once (default: CPUs / 2)")
    add("--timeout", type=positive, default=600, metavar="S", help="seconds to prepare a row (default: 600)")
    add("--json", type=Path, metavar="FILE", help="write the rows there; those of other models stay")


def device_of(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> torch.device:
    """The device of `--device`. Ends the process with a message if there is no such device."""
    try:
        return pick_device(arguments.device)
    except ValueError as error:
        parser.error(str(error))


def pick_device(name: str | None) -> torch.device:
    """The device called `name`, by default a GPU if there is one. ValueError if it is unknown or not there."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: not a device; give cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: nothing captures there; give cpu, cuda or cuda:N")
    if device.type == "cpu" and device.index:
        raise ValueError(f"--device {name}: torch has one CPU device; give cpu")
    available = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= available:
        raise ValueError(f"--device {name}: torch {torch.__version__} sees {available} CUDA devices; try --device cpu")
    return device


def positive(text: str) -> int:
    """A whole number of at least 1, as `type=` of an argument."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give 1 or more") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return number
