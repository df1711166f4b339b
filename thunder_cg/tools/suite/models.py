"""The models of the suite, mostly of other packages, with random weights, as published and in a tiny size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_cg.tools.bench.models import Dlrm, optional
from thunder_cg.tools.suite.language import (
    GROUPED,
    LLAMA,
    NARROW,
    NARROW_GPT2,
    QWEN,
    TINY,
    HuggingFaceDecoder,
    Sizes,
    cache_length,
    hugging_face,
    litgpt,
    litgpt_decoder,
    vocabulary,
)
from thunder_cg.tools.suite.results import DECODE, MODES, TRAINING

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
        decoder: makes the model with a static cache, which decodes one token; None if it cannot. See
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

    def maker(self, mode: str) -> Callable[[bool], nn.Module]:
        return self.decoder if self.decoder is not None and mode == DECODE else self.make

    def batch_for(self, mode: str, tiny: bool) -> ModelInputs:
        return _next_token(tiny) if mode == DECODE else self.batch(tiny, mode == TRAINING)


# ------------------------------------------------------------------------------------------------ transformers


def _language(name: str, model: str, narrow: Sizes, sizes: Sizes) -> SuiteModel:
    """A language model of transformers; `narrow` are the sizes of the tiny one."""

    def make(tiny: bool) -> nn.Module:
        return hugging_face(model, {**sizes, "use_cache": False}, narrow, tiny).train()

    def batch(tiny: bool, trains: bool) -> ModelInputs:
        tokens, labels = _tokens(tiny, trains), _tokens(tiny, trains)
        kwargs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if trains:
            kwargs["labels"] = labels
        elif model == "T5ForConditionalGeneration":
            kwargs["decoder_input_ids"] = labels
        return ModelInputs(kwargs=kwargs)

    def decoder(tiny: bool) -> nn.Module:
        return HuggingFaceDecoder(make(tiny), cache_length(tiny))

    decodes = model.endswith(("ForCausalLM", "LMHeadModel"))
    return SuiteModel(name, "transformers", make, batch, decoder if decodes else None)


def _tokens(tiny: bool, trains: bool) -> Tensor:
    return torch.randint(3, vocabulary(tiny), (2, 16) if tiny else (4 if trains else 1, 128))


def _next_token(tiny: bool) -> ModelInputs:
    """What a decoder takes: a token, and a position in its cache."""
    return ModelInputs((torch.randint(3, vocabulary(tiny), (1, 1)), torch.randint(cache_length(tiny), (1,))))


def _hugging_face_vit(tiny: bool) -> nn.Module:
    transformers = optional("transformers")
    small = {**NARROW, "image_size": 32, "patch_size": 8} if tiny else {}
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
    small = {**TINY, **stacks, **heads, **lengths, "d_model": 32} if tiny else {}
    config = transformers.WhisperConfig(**small, decoder_start_token_id=1, use_cache=False)
    model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    return model.train()


def _speech(tiny: bool, trains: bool) -> ModelInputs:
    """A spectrogram for each row, and the words of its text so far."""
    rows, bins, frames, length = (2, 8, 40, 8) if tiny else (4 if trains else 1, 80, 3000, 64)
    words = torch.randint(3, vocabulary(tiny=True), (rows, length))
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
    _language("Llama 3.2 1B, 4 layers", "LlamaForCausalLM", GROUPED, {**LLAMA, "num_hidden_layers": 4}),
    _language("Qwen3 0.6B, 4 layers", "Qwen3ForCausalLM", GROUPED, {**QWEN, "num_hidden_layers": 4}),
    _language("GPT-2", "GPT2LMHeadModel", NARROW_GPT2, {}),
    _language("BERT base", "BertForMaskedLM", NARROW, {}),
    _language(
        "T5 small",
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        # Through thunderfx, the fused attention of a GPU refuses the strides of T5's bias, without graphs too.
        {"decoder_start_token_id": 0, "attn_implementation": "eager"},
    ),
    SuiteModel("ViT B/16, Hugging Face", "transformers", _hugging_face_vit, _hugging_face_images),
    _language(
        "OLMoE 1B-7B, 2 layers",
        "OlmoeForCausalLM",
        {**NARROW, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2},
        {"num_hidden_layers": 2},
    ),
    _language(
        "Mixtral 8x7B, 1 layer", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, {"num_hidden_layers": 1}
    ),
    _language(
        "DeepSeek V3, 2 layers, 16 experts",
        "DeepseekV3ForCausalLM",
        {
            **NARROW,
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
        {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 16},
    ),
    _language(
        "Gemma 3 1B, 6 layers",
        "Gemma3ForCausalLM",
        GROUPED,
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
        },
    ),
    SuiteModel("Whisper tiny", "transformers", _whisper, _speech),
    SuiteModel("ResNet-50", "torchvision", _resnet, _images),
    SuiteModel("ViT B/16, torchvision", "torchvision", _torchvision_vit, _images),
    SuiteModel("FCN, ResNet-50", "torchvision", _fcn, _segments),
    _timm("ConvNeXt tiny", "convnext_tiny", "test_convnext", drop_path_rate=0.1),
    SuiteModel(
        "pythia-160m",
        "litgpt",
        lambda tiny: _ClassesFirst(litgpt("pythia-160m", tiny)),
        lambda tiny, trains: ModelInputs((_tokens(tiny, trains),), labels=_tokens(tiny, trains)),
        partial(litgpt_decoder, "pythia-160m"),
    ),
    SuiteModel("DiT B/2", "diffusers", _diffusion_transformer, _latents),
    SuiteModel("DLRM", "torch", _dlrm, _clicks),
    _timm("EfficientNet B0", "efficientnet_b0", "test_efficientnet", drop_rate=0.2, drop_path_rate=0.2),
)

MODELS: Mapping[str, SuiteModel] = {entry.name: entry for entry in _ENTRIES}
"""By name, in the order of the table."""
