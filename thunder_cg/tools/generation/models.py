"""The models: of Transformers, with its `generate` and a static cache; of LitGPT, with its own; the demo's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thunder_cg.tools.bench.models import optional
from thunder_cg.tools.demo import CharacterGPT, Decoder, settings_for
from thunder_cg.tools.suite.language import (
    GROUPED,
    LLAMA,
    NARROW_GPT2,
    QWEN,
    Sizes,
    hugging_face,
    litgpt_decoder,
    vocabulary,
)

Compile = Callable[[Any], Any]
TRANSFORMERS, LITGPT, DEMO = "transformers", "litgpt", "thunder_cg"


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


def _hugging_face(name: str, batch: int, model: str, narrow: Sizes, sizes: Sizes) -> GeneratingModel:
    make = partial(hugging_face, model, sizes, narrow)
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


def _litgpt(name: str) -> GeneratingModel:
    return GeneratingModel(f"{name}, LitGPT", LITGPT, partial(litgpt_decoder, name), _compile_model, _litgpt_generate)


def _compile_model(model: nn.Module, compile: Compile | None) -> Any:
    return torch.compile(model, mode="reduce-overhead") if compile is None else compile(model)


def _litgpt_generate(model: Any, prompt: Tensor, new: int) -> Tensor:
    generate = optional("litgpt.generate.base").generate
    length = prompt.shape[1] + new
    found: Tensor = generate(model, prompt[0], max_returned_tokens=length, temperature=0.0, top_p=0.0)  # greedy
    return found.unsqueeze(0)


# ------------------------------------------------------------------------------------------------------- the demo


class _GreedyDecoder(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """The most likely token after `token`, int64, (1,)."""
        return self.decoder.logits(token, position).flatten().argmax(0, keepdim=True)


def _demo(tiny: bool) -> nn.Module:
    settings = settings_for(torch.device("cpu" if tiny else "cuda"))
    return _GreedyDecoder(Decoder(CharacterGPT(settings, vocabulary(tiny)), settings))


def _demo_generate(model: Any, prompt: Tensor, new: int) -> Tensor:
    """The prompt, too, is read token by token."""
    position = torch.zeros(1, dtype=torch.int64, device=prompt.device)
    tokens = [*prompt[0].split(1)]
    for place in range(prompt.shape[1] + new - 1):
        token = model(tokens[place], position)
        position += 1
        if place >= prompt.shape[1] - 1:
            tokens.append(token.clone())  # reduce-overhead writes the next one there
    return torch.cat(tokens).unsqueeze(0)


_ENTRIES = (
    _hugging_face("Llama 3.2 1B", 1, "LlamaForCausalLM", GROUPED, LLAMA),
    _hugging_face("Llama 3.2 1B", 8, "LlamaForCausalLM", GROUPED, LLAMA),
    _hugging_face("Qwen3 0.6B", 1, "Qwen3ForCausalLM", GROUPED, QWEN),
    _hugging_face("Qwen3 0.6B", 8, "Qwen3ForCausalLM", GROUPED, QWEN),
    _hugging_face("GPT-2", 1, "GPT2LMHeadModel", NARROW_GPT2, {}),
    _hugging_face("GPT-2", 8, "GPT2LMHeadModel", NARROW_GPT2, {}),
    _litgpt("pythia-160m"),
    _litgpt("Llama-3.2-1B"),
    _litgpt("Qwen3-0.6B"),
    GeneratingModel("Decoder of the demo", DEMO, _demo, _compile_model, _demo_generate),
)

MODELS: Mapping[str, GeneratingModel] = {entry.name: entry for entry in _ENTRIES}
"""By name, in the order of the table."""
