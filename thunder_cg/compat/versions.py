"""Refuses to start on releases of torch or Thunder whose internals may differ from those that were tested."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from thunder_cg.errors import VersionError

# Half-open ranges. Thunder 0.2.6 cannot import with torch 2.13, and its thunderfx breaks with 2.12.
SUPPORTED = {"torch": ("2.9", "2.12"), "lightning-thunder": ("0.2.6", "0.3")}


def check_versions() -> None:
    """Raises :class:`VersionError` for the first installed package outside its range."""
    for package in SUPPORTED:
        check_version(package)


def check_version(package: str) -> None:
    """Raises :class:`VersionError` if the package is not installed, or is outside its range."""
    least, below = SUPPORTED[package]
    supported = f">={least},<{below}"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise VersionError(package, None, supported) from None
    from looseversion import LooseVersion  # which is missing, too, where nothing is installed

    if not LooseVersion(least) <= LooseVersion(found.split("+")[0]) < LooseVersion(below):
        raise VersionError(package, found, supported)
