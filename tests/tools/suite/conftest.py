"""A row that several tests look at."""

from __future__ import annotations

import pytest
from suite_models import measured

from thunder_cg.tools.suite.results import SuiteRow


@pytest.fixture(scope="session")
def net() -> SuiteRow:
    return measured("Net")
