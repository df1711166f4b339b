"""Turns: who measures is alone, and who comes later waits for those who wait already."""

from __future__ import annotations

import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

from thunder_cg.tools.turns import Turns


def test_who_measures_is_alone(tmp_path: Path) -> None:
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}

    def do(name: str) -> None:
        time.sleep({"first": 0.0, "second": 0.0, "measures": 0.05, "later": 0.1}[name])
        turns = Turns(tmp_path)
        with turns.alone() if name == "measures" else turns.at_work():
            begun[name] = time.monotonic()
            time.sleep(0.2)
            ended[name] = time.monotonic()

    with ThreadPool(4) as threads:
        threads.map(do, ["first", "second", "measures", "later"], chunksize=1)
    assert begun["second"] < ended["first"], "who does not measure works beside others"
    assert max(ended["first"], ended["second"]) <= begun["measures"] and ended["measures"] <= begun["later"]
