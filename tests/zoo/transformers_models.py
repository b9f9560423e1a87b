"""Hugging Face's families at tiny size, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.zoo.models import IMAGE, B, Families, Inputs

transformers_family = Families()

T, S, VOCABULARY, WIDTH = 5, 4, 50, 16  # tokens; tokens of the target
LAYERS: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT: dict[str, Any] = {**LAYERS, **SPECIAL, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
ONE_LAYER = {"num_hidden_layers": 1}  # where another family has two of the same


def ids(length: int = T) -> Tensor:
    return torch.randint(4, VOCABULARY, (B, length))


def padded(length: int = T) -> Inputs:
    """Token ids and a mask, in which every sample has another length."""
    mask = torch.arange(length) < length - torch.arange(B)[:, None]
    return {"input_ids": ids(length), "attention_mask": mask.long()}


def source_and_target() -> Inputs:
    return {**padded(), "decoder_input_ids": ids(S)}


def images() -> Inputs:
    return {"pixel_values": torch.randn(B, 3, IMAGE, IMAGE)}


def hidden(dropout: float) -> dict[str, float]:
    """The dropouts of BERT and its descendants."""
    return {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}


@transformers_family
def bert(dropout: float) -> tuple[nn.Module, Inputs]:
    return hf.BertModel(hf.BertConfig(**TEXT, **hidden(dropout))), padded()


@transformers_family
def bert_eager_attention(dropout: float) -> tuple[nn.Module, Inputs]:
    """Attention as a product, a softmax and a product."""
    config = hf.BertConfig(**TEXT, **hidden(dropout), attn_implementation="eager")
    return hf.BertModel(config), padded()


@transformers_family
def roberta(dropout: float) -> tuple[nn.Module, Inputs]:
    """Positions are counted per sample, from a cumulative sum over tokens that are no padding."""
    return hf.RobertaModel(hf.RobertaConfig(**{**TEXT, **ONE_LAYER}, **hidden(dropout))), padded()


@transformers_family
def distilbert(dropout: float) -> tuple[nn.Module, Inputs]:
    config = hf.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=WIDTH,
        n_layers=1,
        n_heads=2,
        hidden_dim=24,
        max_position_embeddings=16,
        dropout=dropout,
        attention_dropout=dropout,
    )
    return hf.DistilBertModel(config), padded()


@transformers_family
def albert(dropout: float) -> tuple[nn.Module, Inputs]:
    """One layer, applied twice."""
    return hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=8, **hidden(dropout))), padded()


@transformers_family
def deberta_v2(dropout: float) -> tuple[nn.Module, Inputs]:
    """Disentangled attention: a table of relative positions, projected by the keys' layer, gathered per sample."""
    config = hf.DebertaV2Config(
        **TEXT,
        **hidden(dropout),
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
        conv_kernel_size=3,
    )
    return hf.DebertaV2Model(config), padded()


def gpt2_config(dropout: float) -> Any:
    return hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=16,
        use_cache=False,
        **SPECIAL,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )


@transformers_family
def gpt2(dropout: float) -> tuple[nn.Module, Inputs]:
    """Its head is tied to the embedding."""
    return hf.GPT2LMHeadModel(gpt2_config(dropout)), padded()


@transformers_family
def opt(dropout: float) -> tuple[nn.Module, Inputs]:
    config = hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=24,
        word_embed_proj_dim=8,
        max_position_embeddings=16,
        dropout=dropout,
        attention_dropout=dropout,
        use_cache=False,
        **SPECIAL,
    )
    return hf.OPTForCausalLM(config), padded()


def grouped_heads(dropout: float) -> dict[str, Any]:
    """Two heads of queries on one of keys and values."""
    return {**TEXT, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False, "attention_dropout": dropout}


@transformers_family
def llama(dropout: float) -> tuple[nn.Module, Inputs]:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**grouped_heads(dropout))), padded()


@transformers_family
def mistral(dropout: float) -> tuple[nn.Module, Inputs]:
    config = hf.MistralConfig(**{**grouped_heads(dropout), **ONE_LAYER}, sliding_window=3)
    return hf.MistralForCausalLM(config), padded()


@transformers_family
def qwen2(dropout: float) -> tuple[nn.Module, Inputs]:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**{**grouped_heads(dropout), **ONE_LAYER})), padded()


@transformers_family
def gemma2(dropout: float) -> tuple[nn.Module, Inputs]:
    """Caps its logits with tanh; one layer looks at a window, the other at everything."""
    config = hf.Gemma2Config(**grouped_heads(dropout), sliding_window=3, query_pre_attn_scalar=8)
    return hf.Gemma2ForCausalLM(config), padded()


@transformers_family
def t5(dropout: float) -> tuple[nn.Module, Inputs]:
    """A table of relative positions in the first layer, used by all."""
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        use_cache=False,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), source_and_target()


@transformers_family
def bart(dropout: float) -> tuple[nn.Module, Inputs]:
    config = hf.BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=16,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        use_cache=False,
        forced_eos_token_id=2,
        decoder_start_token_id=2,
        **SPECIAL,
    )
    return hf.BartForConditionalGeneration(config), source_and_target()


@transformers_family
def vit(dropout: float) -> tuple[nn.Module, Inputs]:
    config = hf.ViTConfig(**{**LAYERS, **ONE_LAYER}, image_size=IMAGE, patch_size=16, **hidden(dropout))
    return hf.ViTModel(config), images()


@transformers_family
def swin(dropout: float) -> tuple[nn.Module, Inputs]:
    """Adds a table of positions and a mask for each window, repeated for the samples, before they meet the samples."""
    config = hf.SwinConfig(
        image_size=IMAGE,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[1, 2],
        window_size=4,
        drop_path_rate=dropout,
        **hidden(dropout),
    )
    return hf.SwinModel(config), images()


@transformers_family
def convnext(dropout: float) -> tuple[nn.Module, Inputs]:
    config = hf.ConvNextConfig(num_stages=2, hidden_sizes=[8, 12], depths=[1, 2], drop_path_rate=dropout)
    return hf.ConvNextModel(config), images()


@transformers_family
def whisper(dropout: float) -> tuple[nn.Module, Inputs]:
    """Mel frames through convolutions; its encoder's positions are frozen."""
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=6,
        max_target_positions=8,
        dropout=dropout,
        attention_dropout=dropout,
        use_cache=False,
        decoder_start_token_id=3,
        **SPECIAL,
    )
    return hf.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(B, 8, 12),
        "decoder_input_ids": ids(S),
    }


def clip_config(dropout: float) -> Any:
    text = {**TEXT, **ONE_LAYER, "attention_dropout": dropout}
    vision = {**LAYERS, **ONE_LAYER, "image_size": IMAGE, "patch_size": 16, "attention_dropout": dropout}
    return hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)


@transformers_family
def clip_text(dropout: float) -> tuple[nn.Module, Inputs]:
    """The state of the first end of the sentence, which stands elsewhere in every sample."""
    inputs = padded()
    inputs["input_ids"][torch.arange(B), torch.arange(B) + 2] = SPECIAL["eos_token_id"]
    return hf.CLIPTextModelWithProjection(clip_config(dropout).text_config), inputs


@transformers_family
def clip_vision(dropout: float) -> tuple[nn.Module, Inputs]:
    return hf.CLIPVisionModelWithProjection(clip_config(dropout).vision_config), images()


@transformers_family
def mamba(dropout: float) -> tuple[nn.Module, Inputs]:
    """The sequential scan; it has no dropout."""
    config = hf.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=4,
        num_hidden_layers=1,
        time_step_rank=4,
        use_cache=False,
        use_associative_scan=False,
        **SPECIAL,
    )
    return hf.MambaForCausalLM(config), {"input_ids": ids()}


@transformers_family
def mixtral(dropout: float) -> tuple[nn.Module, Inputs]:
    """Every token takes the weights of the experts it was sent to: rows stay with their samples."""
    config = hf.MixtralConfig(
        **{**grouped_heads(dropout), **ONE_LAYER},
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",
    )
    return hf.MixtralForCausalLM(config), padded()
