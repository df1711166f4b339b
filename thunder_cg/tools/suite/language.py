"""Language models of transformers and LitGPT that decode: one new token for each row, with a static cache.

Each takes tokens, int64 (rows, 1), and their position, int64 (1,), and returns logits, (rows, 1, vocabulary).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thunder_cg.tools.bench.models import optional


class HuggingFaceDecoder(nn.Module):
    """A model of transformers and its static cache, whose tensors are buffers."""

    def __init__(self, model: Any, rows: int, length: int) -> None:
        super().__init__()
        self.model = model.eval()
        caches = optional("transformers.cache_utils")
        # `StaticCache` has other layers for sliding windows. They count tokens in Python, and each count is compiled.
        layers = [caches.StaticLayer(length) for _ in range(self.model.config.num_hidden_layers)]
        self.cache = caches.Cache(layers=layers)
        with torch.no_grad():  # the first call allocates the cache
            self.model(torch.zeros(rows, 1, dtype=torch.int64), past_key_values=self.cache, use_cache=True)
        for index, layer in enumerate(layers):
            for part in ("keys", "values", "cumulative_length"):
                self.register_buffer(f"{part}_{index}", getattr(layer, part))

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(position[0])
        logits: Tensor = self.model(tokens, past_key_values=self.cache, use_cache=True).logits
        return logits


def litgpt_decoder(model: Any, rows: int, length: int) -> nn.Module:
    """A model of LitGPT, which has its cache in its buffers."""
    model.max_seq_length = length
    model.set_kv_cache(rows, device=torch.get_default_device(), dtype=torch.get_default_dtype())
    created: nn.Module = model
    return created
