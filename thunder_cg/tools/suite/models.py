"""The models of the suite, mostly of other packages, with random weights, as published and in a tiny size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_cg.tools.bench.models import Dlrm, optional
from thunder_cg.tools.suite.language import HuggingFaceDecoder, litgpt_decoder
from thunder_cg.tools.suite.row import DECODE, MODES, TRAINING

LEARNING_RATE = 0.01


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The arguments of one call. `labels` are the targets of a model that does not return its loss."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    labels: Tensor | None = None

    def call(self, model: Callable[..., Any]) -> Any:
        return model(*self.args, **(self.kwargs or {}))

    def loss(self, output: Any) -> Tensor:
        """The loss that the model returned, or the mean cross-entropy of its logits (batch, classes, ...).

        Of a model that denoises, it is the mean square of what is left of the noise.
        """
        if self.labels is None:
            if isinstance(output, Tensor):
                return output
            loss: Tensor = output.sample.float().square().mean() if hasattr(output, "sample") else output.loss
            return loss
        logits = output["out"] if isinstance(output, Mapping) else output
        classes = logits.shape[1]
        return F.cross_entropy(logits.float().movedim(1, -1).reshape(-1, classes), self.labels.flatten())


@dataclass(frozen=True, slots=True)
class SuiteModel:
    """A model of the suite.

    Attributes:
        package: the Python package that has its code.
        make: makes the model in training mode. The argument is `tiny`: small enough for a CPU, or as published.
        batch: makes random inputs on the CPU, from `tiny` and `trains`. Their shapes are always the same.
        decoder: makes the model with a static cache, which decodes one token for each row; None if it cannot. See
            :mod:`language`.
    """

    name: str
    package: str
    make: Callable[[bool], nn.Module]
    batch: Callable[[bool, bool], ModelInputs]
    decoder: Callable[[bool], nn.Module] | None = None

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(mode for mode in MODES if mode != DECODE or self.decoder is not None)

    def make_for(self, mode: str, tiny: bool) -> nn.Module:
        return self.decoder(tiny) if self.decoder is not None and mode == DECODE else self.make(tiny)

    def batch_for(self, mode: str, tiny: bool) -> ModelInputs:
        return _next_token(tiny) if mode == DECODE else self.batch(tiny, mode == TRAINING)


# ------------------------------------------------------------------------------------------------ transformers


def _next_token(tiny: bool) -> ModelInputs:
    """Tokens (rows, 1) and their position (1,) in the cache."""
    rows, length = _cache_size(tiny)
    tokens = torch.randint(3, _TINY["vocab_size"] if tiny else _VOCABULARY, (rows, 1))
    return ModelInputs((tokens, torch.randint(length, (1,))))


def _cache_size(tiny: bool) -> tuple[int, int]:
    """Rows and tokens."""
    return (2, 32) if tiny else (1, 512)


def _language(name: str, model: str, config: str, tiny: dict[str, Any], real: dict[str, Any]) -> SuiteModel:
    """A language model. The tiny one overrides `real` with `tiny`; all tiny ones have the same small vocabulary."""

    def settings(small: bool) -> dict[str, Any]:
        return {**real, **_TINY, **tiny} if small else real

    def make(small: bool) -> nn.Module:
        transformers = optional("transformers")
        created: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings(small)))
        return created.train()

    def batch(small: bool, trains: bool) -> ModelInputs:
        rows, length, vocabulary = (2, 16, _TINY["vocab_size"]) if small else (4 if trains else 1, 128, _VOCABULARY)
        tokens = torch.randint(3, vocabulary, (rows, length))
        kwargs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if trains:
            kwargs["labels"] = torch.randint(3, vocabulary, (rows, length))
        elif config == "T5Config":
            kwargs["decoder_input_ids"] = torch.randint(3, vocabulary, (rows, length))
        return ModelInputs(kwargs=kwargs)

    def decoder(small: bool) -> nn.Module:
        return HuggingFaceDecoder(make(small), *_cache_size(small))

    decodes = model.endswith(("ForCausalLM", "LMHeadModel"))
    return SuiteModel(name, "transformers", make, batch, decoder if decodes else None)


_VOCABULARY = 30_000  # the smallest of the published ones, so that any model knows all tokens
_TINY = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {**_NARROW, "num_key_value_heads": 2, "head_dim": 8}


def _hugging_face_vit(tiny: bool) -> nn.Module:
    transformers = optional("transformers")
    small = {**_NARROW, "image_size": 32, "patch_size": 8} if tiny else {}
    config = transformers.ViTConfig(
        **small,
        num_labels=10 if tiny else 1000,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        problem_type="single_label_classification",
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model.train()


def _hugging_face_images(tiny: bool, trains: bool) -> ModelInputs:
    plain = _images(tiny, trains)
    kwargs = {"pixel_values": plain.args[0]}
    return ModelInputs(kwargs={**kwargs, "labels": plain.labels} if trains else kwargs)


def _whisper(tiny: bool) -> nn.Module:
    transformers = optional("transformers")
    stacks = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 64))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    lengths = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20}
    small = {**_TINY, **stacks, **heads, **lengths, "d_model": 32} if tiny else {}
    config = transformers.WhisperConfig(**small, decoder_start_token_id=1, use_cache=False)
    model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    return model.train()


def _speech(tiny: bool, trains: bool) -> ModelInputs:
    """A spectrogram for each row, and the words of its text so far."""
    rows, bins, frames, length = (2, 8, 40, 8) if tiny else (4 if trains else 1, 80, 3000, 64)
    words = torch.randint(3, _TINY["vocab_size"], (rows, length))
    return ModelInputs(
        kwargs={"input_features": torch.randn(rows, bins, frames), "labels" if trains else "decoder_input_ids": words}
    )


# ------------------------------------------------------------------------------------------- torchvision, timm


def _images(tiny: bool, trains: bool) -> ModelInputs:
    rows, size, classes = (2, 32, 10) if tiny else (16 if trains else 1, 224, 1000)
    return ModelInputs((torch.randn(rows, 3, size, size),), labels=torch.randint(classes, (rows,)))


def _segments(tiny: bool, trains: bool) -> ModelInputs:
    """A class for each pixel."""
    rows, size = (2, 32) if tiny else (4 if trains else 1, 224)
    return ModelInputs((torch.randn(rows, 3, size, size),), labels=torch.randint(10, (rows, size, size)))


def _resnet(tiny: bool) -> nn.Module:
    models = optional("torchvision.models")
    model: nn.Module = _small_resnet() if tiny else models.resnet50(weights=None)
    return model.train()


def _small_resnet(**settings: Any) -> nn.Module:
    """A ResNet with one block of each kind that a ResNet-50 has."""
    resnet = optional("torchvision.models.resnet")
    model: nn.Module = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=10, width_per_group=16, **settings)
    return model


def _torchvision_vit(tiny: bool) -> nn.Module:
    models = optional("torchvision.models")
    drops = {"dropout": 0.1, "attention_dropout": 0.1}
    model: nn.Module = (
        models.VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10, **drops)
        if tiny
        else models.vit_b_16(weights=None, **drops)
    )
    return model.train()


def _fcn(tiny: bool) -> nn.Module:
    segmentation = optional("torchvision.models.segmentation")
    model: nn.Module = (
        segmentation.fcn._fcn_resnet(_small_resnet(replace_stride_with_dilation=[False, True, True]), 10, None)
        if tiny
        else segmentation.fcn_resnet50(weights=None, weights_backbone=None, num_classes=10)
    )
    return model.train()


def _timm(name: str, model: str, tiny: str, **settings: Any) -> SuiteModel:
    """A model of timm; `tiny` is timm's model of the same kind for tests."""

    def make(small: bool) -> nn.Module:
        more = {"num_classes": 10} if small else {}
        created: nn.Module = optional("timm").create_model(
            tiny if small else model, pretrained=False, **settings, **more
        )
        return created.train()

    return SuiteModel(name, "timm", make, _images)


# ------------------------------------------------------------------------------------- LitGPT, diffusers, our own


class _ClassesFirst(nn.Module):
    """A language model whose logits are (batch, vocabulary, length)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits.transpose(1, 2)


def _pythia(tiny: bool) -> nn.Module:
    return _ClassesFirst(_litgpt(tiny))


def _pythia_decoder(tiny: bool) -> nn.Module:
    return litgpt_decoder(_litgpt(tiny), *_cache_size(tiny))


def _litgpt(tiny: bool) -> Any:
    litgpt = optional("litgpt")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "head_size": 8, "n_query_groups": 4, "intermediate_size": 64}
    words = {"padded_vocab_size": 64, "vocab_size": 64, "block_size": 64}
    return litgpt.GPT(litgpt.Config.from_name("pythia-160m", **({**sizes, **words} if tiny else {})))


def _text(tiny: bool, trains: bool) -> ModelInputs:
    rows, length, vocabulary = (2, 16, 64) if tiny else (4 if trains else 1, 128, _VOCABULARY)
    tokens = torch.randint(vocabulary, (rows, length))
    return ModelInputs((tokens,), labels=torch.randint(vocabulary, (rows, length)))


def _diffusion_transformer(tiny: bool) -> nn.Module:
    diffusers = optional("diffusers")
    heads, layers, sides = (2, 2, 8) if tiny else (12, 12, 32)
    size = {"num_attention_heads": heads, "attention_head_dim": 8 if tiny else 64, "num_layers": layers}
    model: nn.Module = diffusers.DiTTransformer2DModel(
        **size, in_channels=4, sample_size=sides, patch_size=2, norm_num_groups=4
    )
    return model.train()


def _latents(tiny: bool, trains: bool) -> ModelInputs:
    rows, sides = (2, 8) if tiny else (16 if trains else 1, 32)
    steps, classes = torch.randint(1000, (rows,)), torch.randint(1000, (rows,))
    return ModelInputs((torch.randn(rows, 4, sides, sides), steps, classes))


def _dlrm(tiny: bool) -> nn.Module:
    return Dlrm(4, 50, 8, (16,), (16,)) if tiny else Dlrm(26, 10_000, 64, (512, 256), (512, 256))


def _clicks(tiny: bool, trains: bool) -> ModelInputs:
    rows, tables, entries = (16, 4, 50) if tiny else (2048, 26, 10_000)
    indices = torch.randint(entries, (rows, tables))
    return ModelInputs((torch.randn(rows, 13), indices, torch.randint(2, (rows,)).float()))


_ENTRIES = (
    _language(
        "Llama 3.2 1B, 12 layers",
        "LlamaForCausalLM",
        "LlamaConfig",
        _GROUPED,
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 12,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "use_cache": False,
        },
    ),
    _language(
        "Qwen3 0.6B",
        "Qwen3ForCausalLM",
        "Qwen3Config",
        _GROUPED,
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "use_cache": False,
        },
    ),
    _language(
        "GPT-2", "GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}, {"use_cache": False}
    ),
    _language("BERT base", "BertForMaskedLM", "BertConfig", _NARROW, {}),
    _language(
        "T5 small",
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        # Through thunderfx, the fused attention of a GPU refuses the strides of T5's bias, without graphs too.
        {"use_cache": False, "decoder_start_token_id": 0, "attn_implementation": "eager"},
    ),
    SuiteModel("ViT B/16, Hugging Face", "transformers", _hugging_face_vit, _hugging_face_images),
    _language(
        "OLMoE 1B-7B, 2 layers",
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**_NARROW, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2},
        {"num_hidden_layers": 2, "use_cache": False},
    ),
    _language(
        "Mixtral 8x7B, 1 layer",
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_GROUPED, "num_local_experts": 4},
        {"num_hidden_layers": 1, "use_cache": False},
    ),
    _language(
        "DeepSeek V3, 2 layers",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_NARROW,
            "moe_intermediate_size": 16,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
        {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 64, "use_cache": False},
    ),
    _language(
        "Gemma 3 1B",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _GROUPED,
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "use_cache": False,
        },
    ),
    SuiteModel("Whisper tiny", "transformers", _whisper, _speech),
    SuiteModel("ResNet-50", "torchvision", _resnet, _images),
    SuiteModel("ViT B/16, torchvision", "torchvision", _torchvision_vit, _images),
    SuiteModel("FCN, ResNet-50", "torchvision", _fcn, _segments),
    _timm("ConvNeXt tiny", "convnext_tiny", "test_convnext", drop_path_rate=0.1),
    SuiteModel("pythia-160m", "litgpt", _pythia, _text, _pythia_decoder),
    SuiteModel("DiT B/2", "diffusers", _diffusion_transformer, _latents),
    SuiteModel("DLRM", "torch", _dlrm, _clicks),
    _timm("EfficientNet B0", "efficientnet_b0", "test_efficientnet", drop_rate=0.2, drop_path_rate=0.2),
)

MODELS: Mapping[str, SuiteModel] = {entry.name: entry for entry in _ENTRIES}
"""By name, in the order of the table."""
