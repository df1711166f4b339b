"""`python -m thunder_cg <command>`. Only the branch of a command imports what the command needs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that ``argv`` (else this process) names.

    Returns:
        The exit status: that of the command, 2 for wrong arguments, 130 if the user interrupted it, 1 if nobody reads
        what it prints.
    """
    from thunder_cg.tools.arguments import Parser, interruptible

    words = sys.argv[1:] if argv is None else [*argv]
    parser = Parser(
        prog="python -m thunder_cg",
        usage="%(prog)s [-h] command ...",
        description="CUDA graphs for Lightning Thunder.",
        epilog="commands:\n" + "\n".join(f"  {name:10}{command.__doc__}" for name, command in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"thunder-cg {_version()}")
    parser.add_argument("command", choices=_COMMANDS, metavar="command", help="see below; command --help says more")
    if not words:
        parser.print_help(sys.stderr)
        return 2
    command = parser.parse_args(words[:1]).command
    with _without_log():
        return interruptible(lambda argv: _run(command, argv, parser), words[1:])


def _run(command: str, argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    from thunder_cg.compat.versions import check_versions
    from thunder_cg.errors import VersionError

    try:
        if command != "doctor":  # which says what to install
            check_versions()
        code = _COMMANDS[command](argv)
        sys.stdout.flush()
        return code
    except VersionError as error:
        parser.error(str(error))
    except BrokenPipeError:  # who reads the output, such as `head`, has gone; Python would flush it at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


@contextmanager
def _without_log() -> Iterator[None]:
    """Inside, warnings of the log are not printed where nobody has set up logging: commands print reports."""
    logger, handler = logging.getLogger("thunder_cg"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _version() -> str:
    try:
        return version("thunder-cg")
    except PackageNotFoundError:
        return "from a source tree"


def _demo(argv: Sequence[str]) -> int:
    """train and sample a small GPT with and without CUDA graphs, compare bit for bit, show the plan"""
    from thunder_cg.tools import demo_command

    return demo_command.main(argv)


def _bench(argv: Sequence[str]) -> int:
    """measure host time, end-to-end time and memory beside eager, Thunder and a hand-made graph"""
    from thunder_cg.tools.bench import command

    return command.main(argv)


def _rules(argv: Sequence[str]) -> int:
    """print the rule of an operator: whether it is captured, on which conditions, and why"""
    description = "Prints the rules of operators: verdict, conditions, evidence."
    from thunder_cg.tools.arguments import Parser

    parser = Parser("python -m thunder_cg rules", description=description)
    parser.add_argument("names", nargs="+", metavar="NAME", help="an operator, such as torch.det")
    arguments = parser.parse_args(argv)
    from thunder_cg.report.rules import describe

    try:
        print("\n\n".join(map(describe, arguments.names)))
    except LookupError as error:
        parser.error(str(error.args[0]))
    return 0


def _explain(argv: Sequence[str]) -> int:
    """run a script, and say what was captured of its compiled functions, what was not, and why"""
    from thunder_cg.tools import explain

    return explain.main(argv)


def _doctor(argv: Sequence[str]) -> int:
    """say what this machine has for CUDA graphs, which kernels are chosen, and what to change"""
    from thunder_cg.tools import doctor

    return doctor.main(argv)


_COMMANDS: Mapping[str, Callable[[Sequence[str]], int]]
_COMMANDS = {"demo": _demo, "bench": _bench, "rules": _rules, "explain": _explain, "doctor": _doctor}

if __name__ == "__main__":
    sys.exit(main())
