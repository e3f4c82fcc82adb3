"""The models that the estimator must get right: real architectures at small sizes.

Layers are in zoo_layers and zoo_odd.
"""

from functools import partial

import torch
import torchvision
import zoo_layers  # noqa: F401  (registers the small ones)
import zoo_odd  # noqa: F401
from torch import nn
from torchvision.models import DenseNet, ShuffleNetV2, VisionTransformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.efficientnet import EfficientNet, MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)
from zoo_registry import CALIBRATED, ZOO, ZooCase, make, zoo  # noqa: F401

from bench.cases import Case, patchtst
from fastlr.models import load_model


def images(model, size, batch=3):
    """A classifier on random square images."""
    return Case(model.eval(), torch.randn(batch, 3, size, size))


TORCHVISION = {  # name: (a small size that leaves every layer something to do, options)
    "mobilenet_v3_large": (48, {"num_classes": 2}),
    "resnet18": (40, {"num_classes": 10}),
    "shufflenet_v2_x0_5": (40, {"num_classes": 4}),
    "efficientnet_b0": (40, {"num_classes": 10}),
    "densenet121": (48, {"num_classes": 10}),
    "convnext_tiny": (64, {"num_classes": 10}),
    "vit_b_16": (32, {"num_classes": 10}),
    "swin_t": (64, {"num_classes": 10}),
}
# All are slow at any image size: thin ones of the same blocks stand in.
KINKED = {
    "densenet121",
    "densenet121@224",
    "shufflenet_v2_x0_5",
    "shufflenet_v2_x0_5@224",
    "resnet18@224",
}  # seen: float32 autograd itself is off by 1e-4 to 7e-4


def _torchvision(name, small, options):
    def build(size):
        extra = {"image_size": size} if name == "vit_b_16" else {}
        return images(getattr(torchvision.models, name)(**options, **extra), size)

    zoo(name, long=True, kinked=name in KINKED)(lambda: build(small))
    zoo(f"{name}@224", long=True, kinked=f"{name}@224" in KINKED)(lambda: build(224))
    CALIBRATED.update({name, f"{name}@224"})


for _name, (_size, _options) in TORCHVISION.items():
    _torchvision(_name, _size, _options)


MOBILE = [(8, 3, 16, 8, True, "HS", 1, 1, 1.0), (8, 5, 16, 8, False, "RE", 2, 1, 1.0)]
MOBILE = [InvertedResidualConfig(*row) for row in MOBILE]
zoo("mobilenet_thin")(lambda: images(MobileNetV3(MOBILE, last_channel=16, num_classes=2), 24, 4))


class ThinResNet(ResNet):
    """Four stages of 64, 24, 24 and 24 channels; the first is as wide as the stem, as in others."""

    def __init__(self):
        super().__init__(BasicBlock, [1, 1, 1, 1])
        self.fc = nn.Linear(24, 5)

    def _make_layer(self, block, planes, *rest, **options):
        return super()._make_layer(block, 64 if planes == 64 else 24, *rest, **options)


zoo("resnet_thin")(lambda: images(ThinResNet(), 24, 4))
BLOCKS = [CNBlockConfig(12, 16, 2), CNBlockConfig(16, None, 1)]
zoo("convnext_thin")(lambda: images(ConvNeXt(BLOCKS, num_classes=5), 48))
INVERTED = [MBConvConfig(1, 3, 1, 8, 8, 1), MBConvConfig(4, 5, 2, 8, 12, 2)]
zoo("efficientnet_thin")(lambda: images(EfficientNet(INVERTED, 0.2, num_classes=5), 40))
zoo("densenet_thin", kinked=True)(lambda: images(DenseNet(4, (2, 2), 8, num_classes=5), 48))
zoo("vit_thin")(lambda: images(VisionTransformer(32, 8, 2, 2, 16, 24, num_classes=5), 32, batch=4))
swin = partial(SwinTransformer, [2, 2], 12, [2, 1], [2, 2], [4, 4], num_classes=5)
zoo("swin_thin")(lambda: images(swin(), 32))
zoo("swin_v2_thin")(
    lambda: images(swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2), 32)
)
SHUFFLED = [2, 2, 2], [8, 8, 12, 16, 24]
zoo("shufflenet")(lambda: images(ShuffleNetV2(*SHUFFLED, num_classes=4), 40))


def tokens(batch, length):
    """Random token ids [batch, length]."""
    return torch.randint(0, 31, (batch, length))


def text(**more):
    """Four sentences of six tokens, and others of so many."""
    return {name: tokens(4, length) for name, length in {"input_ids": 6, **more}.items()}


def transformer(kind, x, **options):
    """A model of Hugging Face by the name of its class."""
    import transformers

    cls = getattr(transformers, kind)
    return Case(cls(cls.config_class(**options)).eval(), x)


def _patchtst(batch, **options):
    sizes = {
        "num_input_channels": 3,
        "context_length": 48,
        "prediction_length": 8,
        "patch_length": 8,
    }
    sizes |= {
        "patch_stride": 4,
        "num_hidden_layers": 2,
        "d_model": 16,
        "num_attention_heads": 2,
        "ffn_dim": 24,
    }
    return transformer(
        "PatchTSTForPrediction", {"past_values": torch.randn(batch, 48, 3)}, **sizes, **options
    )


zoo("patchtst")(lambda: _patchtst(4))
zoo("patchtst_batch_equals_channels")(lambda: _patchtst(3))
zoo("patchtst_channel_attention")(lambda: _patchtst(4, channel_attention=True))
zoo("patchtst_paper_size", long=True)(lambda: patchtst(4))


@zoo("patchtst_layernorm_cls_token_trained_positions")
def _patchtst_layernorm_cls_token_trained_positions():
    case = _patchtst(
        4, norm_type="layernorm", use_cls_token=True, positional_encoding_type="random"
    )
    case.model.model.encoder.positional_encoder.position_enc.requires_grad_(True)
    return case


def _gpt2(batch, length):
    sizes = {
        "vocab_size": 31,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "use_cache": False,
    }
    x = {"input_ids": tokens(batch, length), "position_ids": torch.arange(length)[None]}
    return transformer("GPT2LMHeadModel", x, **sizes)


zoo("gpt2_tied")(lambda: _gpt2(4, 7))
zoo("gpt2_tied_length_equals_batch")(lambda: _gpt2(5, 5))


@zoo("gpt2_masked_padding")
def _gpt2_masked_padding():
    case = _gpt2(4, 7)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1, 4:] = 0
    mask[3, 6:] = 0
    case.x["attention_mask"] = mask
    return case


SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
}
LLAMA = {
    **SIZES,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": False,
}
T5 = {
    "vocab_size": 31,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "use_cache": False,
}
T5 |= {"decoder_start_token_id": 0}
BERT = {**SIZES, "max_position_embeddings": 16, "num_labels": 3}
MIXTRAL = {
    **SIZES,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
MIXTRAL |= {"use_cache": False, "experts_implementation": "eager"}

zoo("llama")(lambda: transformer("LlamaForCausalLM", text(), **LLAMA))
zoo("t5_relative_bias")(
    lambda: transformer("T5ForConditionalGeneration", text(decoder_input_ids=5), **T5)
)
zoo("bert_classifier")(lambda: transformer("BertForSequenceClassification", text(), **BERT))
zoo("mixtral_experts")(lambda: transformer("MixtralForCausalLM", text(), **MIXTRAL))


@zoo("peft_lora")
def _peft_lora():
    from peft import LoraConfig, get_peft_model

    case = _gpt2(4, 7)
    options = {
        "target_modules": ["c_attn", "c_proj"],
        "r": 2,
        "fan_in_fan_out": True,
        "lora_dropout": 0.0,
    }
    return Case(get_peft_model(case.model, LoraConfig(**options)).eval(), case.x)


@zoo("peft_dora_linear")
def _peft_dora_linear():
    from peft import LoraConfig, get_peft_model

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = get_peft_model(model, LoraConfig(target_modules=["0", "2"], r=2, use_dora=True))
    return Case(model.eval(), torch.randn(4, 6))


@zoo("timm_resnetv2_standardised")
def _timm_resnetv2_standardised():
    from timm.layers import GroupNormAct, StdConv2d
    from timm.models.resnetv2 import ResNetV2

    sizes = {"layers": (1, 1), "channels": (32, 64), "stem_chs": 8, "stem_type": ""}
    layers = {"conv_layer": StdConv2d, "norm_layer": partial(GroupNormAct, num_groups=4)}
    return images(ResNetV2(num_classes=5, **layers, **sizes), 32)


zoo("timm_resnetv2_50", long=True)(
    lambda: images(load_model("timm/resnetv2_50", num_classes=5), 64)
)


@zoo("timm_convmixer")
def _timm_convmixer():
    from timm.models.convmixer import ConvMixer

    return images(ConvMixer(dim=16, depth=2, kernel_size=3, patch_size=4, num_classes=5), 24)


CALIBRATED.update(
    {
        "efficientnet_thin",
        "densenet_thin",
        "mobilenet_thin",
        "resnet_thin",
        "shufflenet",
        "timm_convmixer",
        "patchtst",
    }
)
