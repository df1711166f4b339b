"""What the tests of several tools share."""

from __future__ import annotations

from multiprocessing import get_context

import pytest

from thunder_cg.tools import workers


@pytest.fixture
def forked_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks worker processes, which saves them seconds of imports. They must not use a GPU."""
    request.applymarker(pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"))
    monkeypatch.setattr(workers, "get_context", lambda method: get_context("fork"))
