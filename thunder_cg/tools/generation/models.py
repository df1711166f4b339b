"""The models: those of Transformers with its `generate` and a static cache, those of LitGPT with its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thunder_cg.tools.bench.models import optional

Compile = Callable[[Any], Any]
TRANSFORMERS, LITGPT = "transformers", "litgpt"
VOCABULARY = 64  # of a tiny model


@dataclass(frozen=True, slots=True)
class GeneratingModel:
    """A language model, and how its package generates with it.

    Attributes:
        make: makes the model, on the default device and in the default dtype. The argument is `tiny`: small enough for
            a CPU, or as published.
        compile: compiles, with the function that is given, what the documentation of the package compiles. It returns
            the model to generate with. None stands for ``torch.compile(mode="reduce-overhead")``.
        generate: the tokens, int64 (batch, length), with a prompt (batch, shorter) and as many new ones as is said.
        batch: rows of a prompt.
    """

    name: str
    package: str
    make: Callable[[bool], nn.Module]
    compile: Callable[[nn.Module, Compile | None], Any]
    generate: Callable[[Any, Tensor, int], Tensor]
    batch: int = 1


# ---------------------------------------------------------------------------------------------------- transformers

_TINY: Mapping[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_NARROW: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def _hugging_face(name: str, model: str, config: str, batch: int, tiny: Mapping[str, Any], **sizes: Any) -> Any:
    def make(small: bool) -> nn.Module:
        transformers = optional(TRANSFORMERS)
        settings = {**sizes, **_TINY, **tiny} if small else sizes
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made.eval()

    return GeneratingModel(f"{name}, batch {batch}", TRANSFORMERS, make, _compile_forward, _generate, batch)


def _compile_forward(model: Any, compile: Compile | None) -> Any:
    """On a GPU, `generate` itself compiles all steps but the prompt with reduce-overhead, unless it is told not to."""
    model.generation_config.disable_compile = compile is not None
    if compile is not None:
        model.forward = compile(model.forward)
    return model


def _generate(model: Any, prompt: Tensor, new: int) -> Tensor:
    found: Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache_implementation="static",
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found


# ---------------------------------------------------------------------------------------------------------- LitGPT


def _litgpt(name: str, **tiny: Any) -> GeneratingModel:
    def make(small: bool) -> nn.Module:
        litgpt = optional(LITGPT)
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "head_size": 8, "intermediate_size": 64}
        words = {"padded_vocab_size": VOCABULARY, "vocab_size": VOCABULARY, "block_size": 64}
        model: Any = litgpt.GPT(litgpt.Config.from_name(name, **({**sizes, **words, **tiny} if small else {})))
        model.max_seq_length = min(512, model.config.block_size)
        model.set_kv_cache(batch_size=1, device=torch.get_default_device(), dtype=torch.get_default_dtype())
        made: nn.Module = model.eval()
        return made

    return GeneratingModel(f"{name}, LitGPT", LITGPT, make, _compile_model, _litgpt_generate)


def _compile_model(model: nn.Module, compile: Compile | None) -> Any:
    return torch.compile(model, mode="reduce-overhead") if compile is None else compile(model)


def _litgpt_generate(model: Any, prompt: Tensor, new: int) -> Tensor:
    generate = optional("litgpt.generate.base").generate
    found: Tensor = generate(model, prompt[0], max_returned_tokens=prompt.shape[1] + new, temperature=0.0)
    return found.unsqueeze(0)


_LLAMA: Mapping[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
_QWEN: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}

_ENTRIES = (
    _hugging_face("Llama 3.2 1B", "LlamaForCausalLM", "LlamaConfig", 1, _NARROW, **_LLAMA),
    _hugging_face("Llama 3.2 1B", "LlamaForCausalLM", "LlamaConfig", 8, _NARROW, **_LLAMA),
    _hugging_face("Qwen3 0.6B", "Qwen3ForCausalLM", "Qwen3Config", 1, _NARROW, **_QWEN),
    _hugging_face("GPT-2", "GPT2LMHeadModel", "GPT2Config", 1, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    _litgpt("pythia-160m", n_query_groups=4),
    _litgpt("Llama-3.2-1B", n_query_groups=2),
)

MODELS: Mapping[str, GeneratingModel] = {entry.name: entry for entry in _ENTRIES}
"""By name, in the order of the table."""
