"""The models that the estimator must get right: real architectures at small sizes (zoo_layers, zoo_odd: layers)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import zoo_layers  # noqa: F401  (registers the small ones)
import zoo_odd  # noqa: F401
from torch import Tensor, nn
from zoo_registry import CALIBRATED, ZOO, ZooCase, make, zoo  # noqa: F401

from bench.cases import Case


def image(build: Callable[..., nn.Module], size: int, batch: int = 3, **options: Any) -> Case:
    """A torchvision classifier on random square images."""
    return Case(build(weights=None, **options).eval(), torch.randn(batch, 3, size, size))


TORCHVISION = {  # name: (a small size that leaves every layer something to do, options)
    "mobilenet_v3_large": (48, {"num_classes": 2}),
    "resnet18": (40, {"num_classes": 10}),
    "efficientnet_b0": (40, {"num_classes": 10}),
    "densenet121": (48, {"num_classes": 10}),
    "convnext_tiny": (64, {"num_classes": 10}),
    "vit_b_16": (32, {"num_classes": 10}),
    "swin_t": (64, {"num_classes": 10}),
}
# slow at any image size: thin ones of the same blocks stand in
WIDE = {"convnext_tiny", "vit_b_16", "swin_t", "efficientnet_b0", "densenet121"}
KINKED = {"densenet121", "densenet121@224", "resnet18@224"}  # seen: float32 autograd itself is off by 1e-4 to 7e-4


def _torchvision(name: str, small: int, options: dict[str, Any]) -> None:
    def build(size: int) -> Case:
        import torchvision

        extra = {"image_size": size} if name == "vit_b_16" else {}
        return image(getattr(torchvision.models, name), size, **options, **extra)

    zoo(name, long=name in WIDE, kinked=name in KINKED)(lambda: build(small))
    zoo(f"{name}@224", long=True, kinked=f"{name}@224" in KINKED)(lambda: build(224))
    CALIBRATED.update({name, f"{name}@224"})


for _name, (_size, _options) in TORCHVISION.items():
    _torchvision(_name, _size, _options)


@zoo("convnext_thin")
def _() -> Case:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    model = ConvNeXt([CNBlockConfig(12, 16, 2), CNBlockConfig(16, None, 1)], num_classes=5)
    return Case(model.eval(), torch.randn(3, 3, 48, 48))


@zoo("efficientnet_thin")
def _() -> Case:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 5, 2, 8, 12, 2)]
    return Case(EfficientNet(blocks, 0.2, num_classes=5).eval(), torch.randn(3, 3, 40, 40))


@zoo("densenet_thin", kinked=True)
def _() -> Case:
    from torchvision.models import DenseNet

    return Case(DenseNet(4, (2, 2), 8, num_classes=5).eval(), torch.randn(3, 3, 48, 48))


@zoo("vit_thin")
def _() -> Case:
    from torchvision.models import VisionTransformer

    return Case(VisionTransformer(32, 8, 2, 2, 16, 24, num_classes=5).eval(), torch.randn(4, 3, 32, 32))


@zoo("swin_thin")
def _() -> Case:
    from torchvision.models.swin_transformer import SwinTransformer

    return Case(SwinTransformer([2, 2], 12, [2, 2], [2, 2], [4, 4], num_classes=5).eval(), torch.randn(3, 3, 32, 32))


@zoo("swin_v2_thin")
def _() -> Case:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    model = SwinTransformer(
        [2, 2], 12, [2, 2], [2, 2], [4, 4], num_classes=5, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
    )  # fmt: skip
    return Case(model.eval(), torch.randn(3, 3, 32, 32))


def tokens(batch: int, length: int, vocabulary: int = 31) -> Tensor:
    """Random token ids [batch, length]."""
    return torch.randint(0, vocabulary, (batch, length))


def _patchtst(batch: int, **options: Any) -> Case:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(
        num_input_channels=3, context_length=48, prediction_length=8, patch_length=8, patch_stride=4,
        num_hidden_layers=2, d_model=16, num_attention_heads=2, ffn_dim=24, **options,
    )  # fmt: skip
    return Case(PatchTSTForPrediction(config).eval(), {"past_values": torch.randn(batch, 48, 3)})


@zoo("patchtst")
def _() -> Case:
    return _patchtst(4)


@zoo("patchtst_batch_equals_channels")
def _() -> Case:
    return _patchtst(3)


@zoo("patchtst_layernorm_cls_token_trained_positions")
def _() -> Case:
    case = _patchtst(4, norm_type="layernorm", use_cls_token=True, positional_encoding_type="random")
    case.model.model.encoder.positional_encoder.position_enc.requires_grad_(True)
    return case


@zoo("patchtst_channel_attention")
def _() -> Case:
    return _patchtst(4, channel_attention=True)


@zoo("patchtst_paper_size", long=True)
def _() -> Case:
    from bench.cases import patchtst

    return patchtst(4)


def _gpt2(batch: int, length: int) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    x = {"input_ids": tokens(batch, length), "position_ids": torch.arange(length)[None]}
    return Case(GPT2LMHeadModel(config).eval(), x)


@zoo("gpt2_tied")
def _() -> Case:
    return _gpt2(4, 7)


@zoo("gpt2_tied_length_equals_batch")
def _() -> Case:
    return _gpt2(5, 5)


@zoo("gpt2_masked_padding")
def _() -> Case:
    case = _gpt2(4, 7)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1, 4:] = 0
    mask[3, 6:] = 0
    case.x["attention_mask"] = mask
    return case


@zoo("llama")
def _() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return Case(LlamaForCausalLM(config).eval(), {"input_ids": tokens(4, 6)})


@zoo("t5_relative_bias")
def _() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, use_cache=False, decoder_start_token_id=0
    )
    x = {"input_ids": tokens(4, 6), "decoder_input_ids": tokens(4, 5)}
    return Case(T5ForConditionalGeneration(config).eval(), x)


@zoo("bert_classifier")
def _() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    return Case(BertForSequenceClassification(config).eval(), {"input_ids": tokens(4, 6)})


@zoo("mixtral_experts", expected="ok")
def _() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, use_cache=False,
        experts_implementation="eager",
    )  # fmt: skip
    return Case(MixtralForCausalLM(config).eval(), {"input_ids": tokens(4, 6)})


@zoo("peft_lora")
def _() -> Case:
    from peft import LoraConfig, get_peft_model

    case = _gpt2(4, 7)
    options = {"target_modules": ["c_attn", "c_proj"], "r": 2, "fan_in_fan_out": True, "lora_dropout": 0.0}
    return Case(get_peft_model(case.model, LoraConfig(**options)).eval(), case.x)


@zoo("peft_dora_linear")
def _() -> Case:
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = get_peft_model(model, LoraConfig(target_modules=["0", "2"], r=2, use_dora=True))
    return Case(model.eval(), torch.randn(4, 6))


@zoo("timm_resnetv2_standardised")
def _() -> Case:
    from timm.layers import StdConv2d
    from timm.models.resnetv2 import ResNetV2

    model = ResNetV2(
        layers=(1, 1), channels=(128, 256), num_classes=5, stem_chs=32, stem_type="", conv_layer=StdConv2d
    )  # fmt: skip
    return Case(model.eval(), torch.randn(3, 3, 32, 32))


@zoo("timm_resnetv2_50", long=True)
def _() -> Case:
    import timm

    return Case(timm.create_model("resnetv2_50", num_classes=5).eval(), torch.randn(3, 3, 64, 64))


@zoo("timm_convmixer")
def _() -> Case:
    from timm.models.convmixer import ConvMixer

    model = ConvMixer(dim=16, depth=2, kernel_size=3, patch_size=4, num_classes=5)
    return Case(model.eval(), torch.randn(3, 3, 24, 24))


@zoo("shufflenet")
def _() -> Case:
    from torchvision.models import shufflenet_v2_x0_5

    return image(shufflenet_v2_x0_5, 40, num_classes=4)


CALIBRATED.update({"efficientnet_thin", "densenet_thin", "shufflenet", "timm_convmixer", "patchtst"})
