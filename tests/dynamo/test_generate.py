"""From prompt to tokens, as the documentation of Transformers and LitGPT has it: the same tokens, and a graph for each.

Both packages are optional; the tests are skipped where they are not installed.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import thunder
import torch
from support import regions

from thunder_cg import explain, thunderfx

TOKENS = 10
NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES: dict[str, dict[str, Any]] = {
    "Llama": {**NARROW, **WORDS, "num_key_value_heads": 2, "head_dim": 8},
    "Qwen3": {**NARROW, **WORDS, "num_key_value_heads": 2, "head_dim": 8},
    "GPT2": {**WORDS, "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64},
}


SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}  # of a BART's encoder, or decoder


def prompts(device: str, *shapes: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randint(3, 64, shape, device=device) for shape in shapes]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SIZES)
def test_transformers(backend, device, name, sampled):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES[name])
    model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config)
    model = model.to(device).eval()
    plain = copy.deepcopy(model)
    model.forward = thunderfx(model.forward, backend=backend)
    settings = {"cache_implementation": "static", "max_new_tokens": TOKENS, "do_sample": sampled, "eos_token_id": None}
    for prompt in prompts(device, (1, 5), (1, 9), (1, 5), (8, 7)):
        found = []
        for each in (model, plain):  # on GPUs, `generate` compiles both, and Dynamo counts what has the same code
            torch.manual_seed(3)
            alone = {} if each is model else {"disable_compile": True}
            found.append(each.generate(prompt, attention_mask=torch.ones_like(prompt), **settings, **alone))
        assert torch.equal(*found)
    report = explain(model.forward)
    assert not report.outside, report.outside
    decodes = [trace for trace in report.traces if trace.calls >= TOKENS - 1]
    assert len(decodes) >= 2 and all(trace.regions[0].replays >= trace.calls - 1 for trace in decodes)
    assert all(trace.regions[0].bytes_in < 512 for trace in report.traces), "a cache of 7,680 bytes is not copied"
    assert all(len(trace.regions) == 1 and not trace.regions[0].failure for trace in report.traces), report
    assert all(eager_ops(trace) <= _NEW_CACHE for trace in report.traces), report


_NEW_CACHE = {"Tensor.to", "update_aliases"}  # a cache that is new counts on the CPU at first


def eager_ops(trace):
    return {op.name for op in trace.ops if op.verdict == "eager"}


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_transformers_with_a_sliding_window(backend, device, name):
    """The cache counts its tokens in Python, too: one function until it is full, and one after that."""
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES["Llama"], "sliding_window": 8}
    config = getattr(transformers, f"{name}{'TextConfig' if name == 'Gemma3' else 'Config'}")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(device).eval()
    plain = copy.deepcopy(model)
    model.forward = thunderfx(model.forward, backend=backend)
    settings = {"cache_implementation": "static", "max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    (prompt,) = prompts(device, (1, 5))
    for _ in range(2):
        found = model.generate(prompt, **settings)
        assert torch.equal(found, plain.generate(prompt, **settings, disable_compile=True))
    report = explain(model.forward)
    assert not report.outside and all(eager_ops(trace) <= _NEW_CACHE for trace in report.traces), report
    assert sum(trace.regions[0].replays for trace in report.traces) >= 20, report


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_encoder_decoders(backend, device, name):
    """The decoder: its encoder is called by itself. Its second cache is full after the first token."""
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "num_heads": 4, "num_layers": 2, "d_kv": 8, "d_ff": 64}
    if name == "Bart":
        sides = {f"{side}_{part}": n for side in ("encoder", "decoder") for part, n in SIDE.items()}
        sizes = {**sides, "d_model": 32, "max_position_embeddings": 64, "forced_eos_token_id": None}
    config = getattr(transformers, f"{name}Config")(**{**WORDS, **sizes, "decoder_start_token_id": 2})
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).to(device).eval()
    plain = copy.deepcopy(model)
    model.forward = thunderfx(model.forward, backend=backend)
    settings = {"cache_implementation": "static", "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    for prompt in prompts(device, (1, 5), (1, 7), (1, 5)):
        expected = plain.generate(prompt, **settings, disable_compile=True)
        assert torch.equal(model.generate(prompt, **settings), expected)
    report = explain(model.forward)
    assert not report.outside and all(len(trace.regions) == 1 for trace in report.traces), report
    assert sum(trace.regions[0].replays for trace in report.traces) >= 10, report


def litgpt_twins(name: str, device: str) -> tuple[Any, Any]:
    """Two equal models with caches."""
    litgpt = pytest.importorskip("litgpt")
    groups = 4 if name.startswith("pythia") else 2
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": groups, "head_size": 8, "intermediate_size": 64}
    config = litgpt.Config.from_name(name, **sizes, block_size=64, padded_vocab_size=64, vocab_size=60)
    model = litgpt.GPT(config).to(device).eval()
    plain = copy.deepcopy(model)
    for each in (model, plain):
        each.set_kv_cache(batch_size=1, device=device)
    return model, plain


def same_tokens_of_litgpt(device: str, *models: Any) -> None:
    from litgpt.generate.base import generate

    for prompt in prompts(device, (1, 5), (1, 9), (1, 5)):
        found = []
        for each in models:
            torch.manual_seed(3)
            found.append(generate(each, prompt[0], max_returned_tokens=prompt.shape[1] + TOKENS, top_k=5))
        assert torch.equal(*found)


@pytest.mark.parametrize("name", ["pythia-14m", "Llama-3.2-1B", "Qwen3-0.6B"])
def test_litgpt(transform, device, name):
    model, plain = litgpt_twins(name, device)
    compiled = thunder.jit(model, transforms=[transform()])
    same_tokens_of_litgpt(device, compiled, thunder.jit(plain))
    each = regions(compiled)
    assert all(region["failure"] is None for region in each)
    assert max(region["replays"] for region in each) >= 3 * (TOKENS - 1) - 2, "one function serves all prompts"


@pytest.mark.nightly
def test_litgpt_through_thunderfx(backend, device):
    """Both without the Python number that grows with each token: what is masked has no weight, but other kernels."""
    model, plain = litgpt_twins("Llama-3.2-1B", device)
    forwards = thunderfx(model.forward, backend=backend), plain.forward
    for each, forward in zip((model, plain), forwards):
        each.forward = lambda idx, position, forward=forward, **_: forward(idx, position)
    same_tokens_of_litgpt(device, model, plain)
    report = explain(forwards[0])
    assert not report.outside and all(len(trace.regions) == 1 for trace in report.traces), report
    assert max(trace.regions[0].replays for trace in report.traces) >= 3 * (TOKENS - 1) - 2


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_experts_train(backend, device, name):
    """With PyTorch's gradients, those of the routers, too.

    In float32, Transformers has an operator of its own, whose backward reads the groups on the host in some versions.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES["Llama"], "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
    sizes["moe_intermediate_size"] = 32
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes))
    model = model.to(device, torch.bfloat16 if backend == "cuda" else torch.float32)
    tolerance = 0.1 if backend == "cuda" else 1e-5
    plain = copy.deepcopy(model)
    compiled = thunderfx(model, backend=backend)
    for (prompt,) in [prompts(device, (2, 8)) for _ in range(4)]:
        for each in (model, plain):
            each.zero_grad()
        found, expected = compiled(input_ids=prompt, labels=prompt).loss, plain(input_ids=prompt, labels=prompt).loss
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
        found.backward()
        expected.backward()
        for one, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=tolerance * float(other.grad.abs().max()))
    report = explain(compiled)
    assert not report.outside and len(report.traces) == 2
    if backend == "tape":
        assert "set_experts_implementation('batched_mm')" in str(report)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "implementation"), [(torch.float32, "batched_mm"), (torch.bfloat16, "grouped_mm")], ids=str
)
def test_experts_in_one_region(backend, device, dtype, implementation):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(**{**SIZES["Llama"], "num_local_experts": 4})
    model = transformers.MixtralForCausalLM(config).to(device, dtype).eval()
    model.set_experts_implementation(implementation)
    graphed = thunderfx(model, backend=backend)
    with torch.no_grad():
        for (prompt,) in [prompts(device, (2, 8)) for _ in range(4)]:
            found, expected = (each(input_ids=prompt, use_cache=False).logits for each in (graphed, model))
            torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-3)
    assert [r["replays"] for r in regions(graphed)] == [3] and not eager_ops(explain(graphed).traces[0])
