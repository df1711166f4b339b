"""Turns: who measures is alone, and who comes later waits for those who wait already."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

from thunder_cg.tools.turns import Turns

LIMIT = 30.0  # seconds


def is_locked(path: Path) -> bool:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_who_measures_is_alone(tmp_path: Path) -> None:
    names = "first", "second", "measures", "later"
    begun, may_end = ({name: threading.Event() for name in names} for _ in range(2))
    seen: list[str] = []

    def do(name: str) -> None:
        turns = Turns(tmp_path)
        with turns.alone() if name == "measures" else turns.at_work():
            seen.append(f"{name} begins")
            begun[name].set()
            may_end[name].wait(LIMIT)
            seen.append(f"{name} ends")

    threads = {name: threading.Thread(target=do, args=(name,), daemon=True) for name in names}
    for name in ("first", "second"):
        threads[name].start()
        assert begun[name].wait(LIMIT), "who does not measure works beside others"
    threads["measures"].start()
    deadline = time.monotonic() + LIMIT
    while not is_locked(tmp_path / "gate"):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    threads["later"].start()
    threads["later"].join(0.02)
    assert seen == ["first begins", "second begins"]
    for name in names:
        may_end[name].set()
    for thread in threads.values():
        thread.join(LIMIT)
    assert seen[4:] == ["measures begins", "measures ends", "later begins", "later ends"]
