"""Wrong and missing versions are said with what to install."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from thunder_cg.compat import versions
from thunder_cg.errors import VersionError


def missing(package: str) -> str:
    raise PackageNotFoundError(package)


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (lambda package: "2.8.0+cpu" if package == "torch" else "0.2.6", "torch 2.8.0+cpu is installed"),
        (lambda package: "2.11.0" if package == "torch" else "0.3.1", "lightning-thunder 0.3.1 is installed"),
        (lambda package: "2.11.0" if package == "torch" else missing(package), "lightning-thunder is not installed"),
    ],
)
def test_a_wrong_or_missing_package(monkeypatch, version, problem):
    monkeypatch.setattr(versions, "version", version)
    package = problem.split()[0]
    least, below = versions.SUPPORTED[package]
    with pytest.raises(VersionError) as error:
        versions.check_versions()
    said = f"thunder_cg needs {package} >={least},<{below}, but {problem}; pip install '{package}>={least},<{below}'"
    assert str(error.value) == said


def test_where_nothing_is_installed(monkeypatch):
    """In a checkout, with a bare Python."""
    monkeypatch.setitem(sys.modules, "looseversion", None)
    spec = spec_from_file_location("fresh_versions", versions.__file__)
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(fresh, "version", missing)
    with pytest.raises(VersionError, match="torch is not installed; pip install 'torch"):
        fresh.check_versions()


def test_these_versions_are_supported():
    versions.check_versions()
