"""The catalogue of models, and the packages that it needs."""

from __future__ import annotations

from pathlib import Path

from thunder_cg.tools.suite import models
from thunder_cg.tools.suite.results import PACKAGES

ROOT = Path(__file__).parents[3]


def test_packages_of_the_models_are_an_extra() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = text.partition("\nsuite = [")[2].partition("]")[0]
    others = {model.package for model in models.MODELS.values()} - {"torch"}
    assert {package.strip('" \n') for package in extra.split(",") if package.strip()} == others
    assert {*PACKAGES} == others
