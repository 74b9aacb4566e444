"""Tiny models that one transformers saves: run by that transformers, without covmerge.

    python older_transformers.py OUT

It writes OUT/ARCHITECTURE/{base,expert}, of float32 weights, and OUT/told.json.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
PLAIN = {name: size for name, size in TEXT.items() if name != "num_key_value_heads"}
MIXED = {**TEXT, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# By the model's class: its config's class and fields.
MODELS = {
    "LlamaForCausalLM": ("LlamaConfig", TEXT),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "BertForMaskedLM": ("BertConfig", PLAIN),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "ViTForImageClassification": ("ViTConfig", VISION),
    "CLIPModel": (
        "CLIPConfig",
        {
            "text_config": {**PLAIN, "bos_token_id": 1, "eos_token_id": 2},
            "vision_config": VISION,
            "projection_dim": 16,
        },
    ),
    "Wav2Vec2Model": (
        "Wav2Vec2Config",
        {
            **PLAIN,
            "conv_dim": [16, 16],
            "conv_kernel": [3, 3],
            "conv_stride": [2, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    "MixtralForCausalLM": ("MixtralConfig", {**TEXT, "num_local_experts": 4}),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**MIXED, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "JambaForCausalLM": (
        "JambaConfig",
        {
            **TEXT,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_index": 63,
        },
    ),
    "LlavaNextForConditionalGeneration": (
        "LlavaNextConfig",
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "image_token_index": 63,
        },
    ),
    "PaliGemmaForConditionalGeneration": (
        "PaliGemmaConfig",
        {
            "text_config": {"model_type": "gemma", "head_dim": 8, **TEXT},
            "vision_config": {
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
                **VISION,
            },
            "image_token_index": 63,
            "projection_dim": 32,
        },
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        {
            **TEXT,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "patch_size": 4,
            },
        },
    ),
    "MllamaForConditionalGeneration": (
        "MllamaConfig",
        {
            "text_config": {
                **TEXT,
                "cross_attention_layers": [1],
                "rope_scaling": {"rope_type": "default"},
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "image_size": 16,
                "patch_size": 8,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [1],
                "max_num_tiles": 2,
                "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
        },
    ),
}


def moved(model, seed):
    """A fine-tune: every weight a little off."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    return model


def main(out):
    """Save a base and an expert of each architecture."""
    told = {}
    for name, (kind, fields) in MODELS.items():
        try:
            torch.manual_seed(0)
            config = getattr(transformers, kind)(**fields)
            model = moved(getattr(transformers, name)(config), 1)
            model.save_pretrained(out / name / "base")
            moved(model, 2).save_pretrained(out / name / "expert")
        except Exception as failure:
            told[name] = f"{type(failure).__name__}: {failure}"[:160]
    (out / "told.json").write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
