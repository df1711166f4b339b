"""Options of the tests, and how they are shared out. What imports PyTorch is in common.py."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """With ``-n``, the process that starts the workers runs no test. They would wait while it imports PyTorch."""
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("common")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--programs", type=int, help="how many call patterns tests/programs runs, from seeds that nobody has seen"
    )
    parser.addoption("--nightly", action="store_true", help="also run what takes long and differs little from the rest")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    counts, chosen, others = Counter[tuple[str, Any]](), [], []
    runs_all = config.getoption("nightly") or config.getoption("programs") is not None
    for item in items:
        is_nightly = item.get_closest_marker("nightly") is not None
        if (after := item.get_closest_marker("nightly_after")) is not None:
            counts[of := (item.nodeid.partition("[")[0], item.callspec.params.get("backend"))] += 1
            is_nightly |= counts[of] > after.args[0]
        (others if is_nightly and not runs_all else chosen).append(item)
    items[:] = chosen
    config.hook.pytest_deselected(items=others)  # to skip one takes as long as a quick test


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: tests of a file, which share fixtures, stay together; a worker that is done takes some of others."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)
