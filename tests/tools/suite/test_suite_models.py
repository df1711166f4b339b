"""The catalogue of models, and the packages that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thunder_cg.tools.suite import models
from thunder_cg.tools.suite.results import DECODE, FORWARD, PACKAGES, TRAINING

ROOT = Path(__file__).parents[3]


def test_packages_of_the_models_are_an_extra() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = text.partition("\nsuite = [")[2].partition("]")[0]
    others = {model.package for model in models.MODELS.values()} - {"torch"}
    assert {package.strip('" \n') for package in extra.split(",") if package.strip()} == others
    assert {*PACKAGES} == others


def test_only_language_models_decode() -> None:
    assert models.MODELS["GPT-2"].modes == (FORWARD, TRAINING, DECODE)
    assert models.MODELS["BERT base"].modes == models.MODELS["ResNet-50"].modes == (FORWARD, TRAINING)


@pytest.mark.parametrize("name", ["Llama 3.2 1B, 4 layers", "GPT-2", "Gemma 3 1B, 6 layers", "pythia-160m"])
@torch.no_grad()
def test_a_decoder_computes_what_its_model_does(name: str) -> None:
    model = models.MODELS[name]
    pytest.importorskip(model.package)
    decoder = model.maker(DECODE)(True).eval()
    tokens = torch.randint(3, 64, (1, 4))
    logits = [decoder(tokens[:, i : i + 1], torch.tensor([i])) for i in range(4)]
    plain = getattr(decoder, "model", decoder)(tokens)
    torch.testing.assert_close(torch.cat(logits, 1), getattr(plain, "logits", plain))
    assert len([*decoder.buffers()]) >= 4, "the caches are compared, too"
