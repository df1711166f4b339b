"""Language models of transformers and LitGPT: their sizes, as published and tiny, and their static caches.

A decoder takes one token, int64 (1, 1), and its position, int64 (1,). It returns logits, (1, 1, vocabulary). Its cache
is in its buffers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thunder_cg.tools.bench.models import optional

Sizes = Mapping[str, Any]

LLAMA: Sizes = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
QWEN: Sizes = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}

TINY: Sizes = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NARROW: Sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED: Sizes = {**NARROW, "num_key_value_heads": 2, "head_dim": 8}
NARROW_GPT2: Sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4}
_TINY_LITGPT: Sizes = {
    **NARROW_GPT2,
    "head_size": 8,
    "n_query_groups": 2,
    "intermediate_size": 64,
    "padded_vocab_size": 64,
    "vocab_size": 64,
    "block_size": 64,
}


def vocabulary(tiny: bool) -> int:
    """The smallest of all models of a size, so that any model knows all tokens."""
    return 64 if tiny else 30_000


def cache_length(tiny: bool) -> int:
    return 64 if tiny else 512


def hugging_face(model: str, sizes: Sizes, narrow: Sizes, tiny: bool) -> nn.Module:
    """A model of transformers. The tiny one overrides `sizes` with `narrow`, and has a small vocabulary."""
    kind = getattr(optional("transformers"), model)
    created: nn.Module = kind(kind.config_class(**({**sizes, **TINY, **narrow} if tiny else sizes)))
    return created


def litgpt(name: str, tiny: bool) -> Any:
    package = optional("litgpt")
    return package.GPT(package.Config.from_name(name, **(_TINY_LITGPT if tiny else {})))


def litgpt_decoder(name: str, tiny: bool) -> nn.Module:
    model = litgpt(name, tiny)
    model.max_seq_length = cache_length(tiny)
    model.set_kv_cache(1, device=torch.get_default_device(), dtype=torch.get_default_dtype())
    created: nn.Module = model
    return created


class HuggingFaceDecoder(nn.Module):
    """A decoder of a model of transformers."""

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        self.model = model
        caches = optional("transformers.cache_utils")
        # `StaticCache` has other layers for sliding windows. They count tokens in Python, and each count is compiled.
        layers = [caches.StaticLayer(length) for _ in range(model.config.num_hidden_layers)]
        self.cache = caches.Cache(layers=layers)
        old = "past_key_values"
        self._name = old if old in inspect.signature(model.forward).parameters else "cache"
        with torch.no_grad():  # the first call allocates the cache
            self._logits(torch.zeros(1, 1, dtype=torch.int64))
        for index, layer in enumerate(layers):
            for part in ("keys", "values", "cumulative_length"):
                self.register_buffer(f"{part}_{index}", getattr(layer, part))

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(position[0])
        return self._logits(tokens)

    def _logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=True, **{self._name: self.cache}).logits
        return logits
