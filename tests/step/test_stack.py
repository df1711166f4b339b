"""What earlier calls left on the stack is gone when a step is captured."""

from __future__ import annotations

import ctypes
import inspect
import subprocess
import sys

import pytest

from thunder_cg.step import stack
from thunder_cg.step.stack import clear_stack

# Without the package, whose imports take seconds.
_SCRIPT = """
import ctypes, runpy, sys
clear_stack = runpy.run_path(sys.argv[1])["clear_stack"]
{bytes_on_stack}
clear_stack(0xA7)
before = bytes_on_stack(0xA7)
clear_stack()
print(before, bytes_on_stack(0xA7))
"""


def bytes_on_stack(byte: int) -> int:
    """How many bytes of the main thread's stack have this value, next to others of it."""
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if "[stack]" in line)
    start, stop = (int(address, 16) for address in line.split()[0].split("-"))
    return 64 * ctypes.string_at(start, stop - start).count(bytes([byte]) * 64)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_stack_is_cleared():
    script = _SCRIPT.format(bytes_on_stack=inspect.getsource(bytes_on_stack))
    done = subprocess.run([sys.executable, "-c", script, stack.__file__], capture_output=True, text=True)
    before, after = map(int, done.stdout.split())
    assert before > 150_000 and after == 0, done.stderr


def test_it_can_be_called_often():
    for byte in range(8):
        clear_stack(byte)
