"""timm's families at tiny size, with random weights."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.models.metaformer import GroupNorm1, GroupNorm1NoBias, MetaFormer
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from timm.models.nfnet import NfCfg, NormFreeNet
from torch import nn

from tests.zoo.models import IMAGE, B, Families, Inputs

timm_family = Families()

PATCHES: dict[str, Any] = {"img_size": IMAGE, "patch_size": 16, "num_classes": 5, "embed_dim": 16}
LAYERS: dict[str, Any] = {"depth": 2, "num_heads": 2}
STAGES: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (8, 8, 12, 12), "num_classes": 5}


def images() -> Inputs:
    return {"x": torch.randn(B, 3, IMAGE, IMAGE)}


def dropouts(p: float) -> dict[str, float]:
    """Every kind of dropout of a timm transformer."""
    return {"pos_drop_rate": p, "proj_drop_rate": p, "attn_drop_rate": p, "drop_path_rate": p, "drop_rate": p}


def create(name: str, **options: Any) -> tuple[nn.Module, Inputs]:
    """One of timm's named models, its sizes overridden."""
    return timm.create_model(name, pretrained=False, **options), images()


@timm_family
def vit(dropout: float) -> tuple[nn.Module, Inputs]:
    return create("vit_tiny_patch16_224", **PATCHES, **LAYERS, **dropouts(dropout))


@timm_family
def swin(dropout: float) -> tuple[nn.Module, Inputs]:
    """The second block of each stage shifts its windows: a mask for each window, repeated for the samples."""
    sizes = {"img_size": IMAGE, "num_classes": 5, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)}
    rates = {name: p for name, p in dropouts(dropout).items() if name != "pos_drop_rate"}
    return create("swin_tiny_patch4_window7_224", **sizes, window_size=4, **rates)


@timm_family
def convnext(dropout: float) -> tuple[nn.Module, Inputs]:
    return create("convnext_atto", **STAGES, drop_path_rate=dropout, drop_rate=dropout)


@timm_family
def convnext_v2(dropout: float) -> tuple[nn.Module, Inputs]:
    """Global response normalisation: a norm over space, divided by its mean over channels."""
    return create("convnextv2_atto", **STAGES, drop_path_rate=dropout, drop_rate=dropout)


@timm_family
def cait(dropout: float) -> tuple[nn.Module, Inputs]:
    """Talking heads: a linear layer over the heads of the attention."""
    return create("cait_xxs24_224", **PATCHES, **LAYERS, depth_token_only=1, **dropouts(dropout))


@timm_family
def xcit(dropout: float) -> tuple[nn.Module, Inputs]:
    """Has batch norm in its patch embedding and between its layers, and so comes in eval mode."""
    model, inputs = create("xcit_nano_12_p16_224", **PATCHES, **LAYERS, cls_attn_layers=1, **dropouts(dropout))
    return batch_norm_frozen(model), inputs


def batch_norm_frozen(model: nn.Module) -> nn.Module:
    """The model in training mode, its batch norms in eval mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


@timm_family
def poolformer(dropout: float) -> tuple[nn.Module, Inputs]:
    rates = {"drop_path_rate": dropout, "proj_drop_rate": dropout, "drop_rate": dropout}
    scales: dict[str, Any] = {"layer_scale_init_values": 1e-5, "res_scale_init_values": None}
    model = MetaFormer(
        **STAGES,
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=GroupNorm1,
        use_mlp_head=False,
        **scales,
        **rates,
    )
    return model, images()


@timm_family
def poolformer_v2(dropout: float) -> tuple[nn.Module, Inputs]:
    """StarReLU, a parameter that multiplies a square, and scaled residuals."""
    rates = {"drop_path_rate": dropout, "proj_drop_rate": dropout, "drop_rate": dropout}
    return MetaFormer(**STAGES, norm_layers=GroupNorm1NoBias, use_mlp_head=False, **rates), images()


@timm_family
def nfnet(dropout: float) -> tuple[nn.Module, Inputs]:
    """Standardised convolution weights (through batch_norm of the weight), squeeze and excite, skip gains."""
    config = NfCfg(
        depths=(1, 2),
        channels=(16, 16),
        stem_type="deep_quad",
        stem_chs=16,
        group_size=8,
        bottle_ratio=0.5,
        extra_conv=True,
        num_features=16,
        act_layer="gelu",
        attn_layer="se",
        attn_kwargs={"rd_ratio": 0.5},
        skipinit=True,
    )
    return NormFreeNet(config, num_classes=5, drop_path_rate=dropout, drop_rate=dropout), images()


@timm_family
def resmlp(dropout: float) -> tuple[nn.Module, Inputs]:
    rates = {"proj_drop_rate": dropout, "drop_path_rate": dropout, "drop_rate": dropout}
    return MlpMixer(**PATCHES, num_blocks=2, mlp_ratio=2, block_layer=ResBlock, norm_layer=Affine, **rates), images()


@timm_family
def mlp_mixer(dropout: float) -> tuple[nn.Module, Inputs]:
    rates = {"proj_drop_rate": dropout, "drop_path_rate": dropout, "drop_rate": dropout}
    return MlpMixer(**PATCHES, num_blocks=2, **rates), images()


@timm_family
def tnt(dropout: float) -> tuple[nn.Module, Inputs]:
    """A transformer within every patch: samples and patches share a dimension."""
    heads = {"inner_dim": 8, "depth": 2, "num_heads_inner": 2, "num_heads_outer": 2}
    # its dropout of the attention writes over what softmax's backward needs: plain PyTorch cannot train it either
    rates = {**dropouts(dropout), "attn_drop_rate": 0.0}
    return create("tnt_s_patch16_224", **PATCHES, **heads, **rates)


@timm_family
def edgenext(dropout: float) -> tuple[nn.Module, Inputs]:
    return create("edgenext_xx_small", **STAGES, heads=(2, 2, 2, 2), drop_path_rate=dropout, drop_rate=dropout)


@timm_family
def beit(dropout: float) -> tuple[nn.Module, Inputs]:
    """A table of relative positions for each layer."""
    options = {"use_abs_pos_emb": False, "use_rel_pos_bias": True, "init_values": 0.1}
    return create("beit_base_patch16_224", **PATCHES, **LAYERS, **options, **dropouts(dropout))


@timm_family
def beit_shared(dropout: float) -> tuple[nn.Module, Inputs]:
    """One table of relative positions that all layers share."""
    options = {"use_abs_pos_emb": False, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
    return create("beit_base_patch16_224", **PATCHES, **LAYERS, **options, **dropouts(dropout))


@timm_family
def eva02(dropout: float) -> tuple[nn.Module, Inputs]:
    """Rotary positions, SwiGLU with a norm in it, biases for q and v alone."""
    return create("eva02_tiny_patch14_224", **PATCHES, **LAYERS, scale_mlp=True, **dropouts(dropout))
