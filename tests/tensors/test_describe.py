"""Roles of real, tiny models as transformers stores them."""

import fnmatch
import time

import pytest
import torch

from covmerge.base.types import Role, TensorHeader
from covmerge.files.tensors.describe import describe, family_of
from covmerge.files.tensors.views import MatrixLayout
from tests.tensors.models import MODELS, headers_of, saved, shapes

LINEAR, CONV1D, STACK = Role.LINEAR, Role.CONV1D, Role.EXPERT_STACK
TRANSPOSED_STACKS = ("gpt_oss", "llama4")

# Per model: glob on stored names -> role. Norms and biases are checked for all models alike.
EXPECTED: dict[str, dict[str, Role]] = {
    "bert": {"*_embeddings.weight": Role.EMBEDDING, "*.dense.weight": LINEAR},
    "bert_classifier": {"*_embeddings.weight": Role.EMBEDDING, "classifier.weight": LINEAR},
    "roberta": {"*_embeddings.weight": Role.EMBEDDING, "classifier.*.weight": LINEAR},
    "gpt2": {
        "*.wte.weight": Role.EMBEDDING,
        "*.wpe.weight": Role.EMBEDDING,
        "*.c_*.weight": CONV1D,
    },
    "gpt2_cross": {"*.c_*.weight": CONV1D, "*.q_attn.weight": CONV1D},
    "gpt2_classifier": {"*.c_*.weight": CONV1D, "score.weight": LINEAR},
    "llama": {"*_proj.weight": LINEAR, "lm_head.weight": Role.OUTPUT, "*embed*": Role.EMBEDDING},
    "llama_tied": {"*_proj.weight": LINEAR, "*embed_tokens*": Role.EMBEDDING},
    "mistral": {"*_proj.weight": LINEAR, "lm_head.weight": Role.OUTPUT},
    "mixtral": {"*.experts.*.w?.weight": LINEAR, "*.gate.weight": LINEAR},
    "qwen3_moe": {"*.experts.*_proj.weight": LINEAR, "*.gate.weight": LINEAR},
    "gpt_oss": {
        "*.experts.gate_up_proj": STACK,
        "*.experts.down_proj": STACK,
        "*.experts.*_bias": Role.BIAS,
        "*.router.weight": LINEAR,
        "*.router.bias": Role.BIAS,
        "*.sinks": Role.OTHER,
    },
    "llama4": {"*.experts.*": STACK, "*.router.weight": LINEAR},
    "t5": {"shared.weight": Role.EMBEDDING, "*_bias.weight": Role.EMBEDDING},
    "vit": {
        "*.cls_token": Role.OTHER,
        "*.position_embeddings": Role.OTHER,
        "*.projection.weight": Role.CONV,
        "classifier.weight": LINEAR,
    },
    "clip": {
        "*.class_embedding": Role.OTHER,
        "logit_scale": Role.OTHER,
        "*.patch_embedding.weight": Role.CONV,
        "*.token_embedding.weight": Role.EMBEDDING,
        "text_projection.weight": LINEAR,
        "*.pre_layrnorm.weight": Role.NORM,
    },
    "gpt_neox": {"embed_out.weight": Role.OUTPUT, "*.query_key_value.weight": LINEAR},
    "phi3": {"*.qkv_proj.weight": LINEAR},
    "bloom": {"*.word_embeddings.weight": Role.EMBEDDING, "*embeddings_layernorm.*": Role.NORM},
}


@pytest.mark.parametrize("key", MODELS)
def test_every_stored_tensor_has_its_role_from_the_module(key: str):
    model = saved(key)
    described = model.describe()
    assert described.source == "skeleton"
    assert described.notes == ()
    assert list(described.tensors) == list(model.tensors)
    for name, info in described.tensors.items():
        assert "name rule" not in info.why
        if name.endswith("norm.weight"):
            assert info.role is Role.NORM, name
        if name.endswith(".bias"):
            assert info.role in (Role.BIAS, Role.NORM), name
        if info.role in (LINEAR, CONV1D, Role.EMBEDDING, Role.OUTPUT):
            assert model.tensors[name].ndim == 2, name
        transposed = info.role is CONV1D or (info.role is STACK and key in TRANSPOSED_STACKS)
        assert info.layout == MatrixLayout(transposed, stacked=info.role is STACK), name
    for pattern, role in EXPECTED.get(key, {}).items():
        matching = fnmatch.filter(described.tensors, pattern)
        assert matching, pattern
        assert {described.tensors[name].role for name in matching} == {role}, pattern


@pytest.mark.parametrize(
    ("key", "tied"),
    [
        ("llama", {}),
        ("llama_tied", {"lm_head.weight": "model.embed_tokens.weight"}),
        ("gpt2", {"lm_head.weight": "transformer.wte.weight"}),
        (
            "t5",
            {
                "encoder.embed_tokens.weight": "shared.weight",
                "decoder.embed_tokens.weight": "shared.weight",
                "lm_head.weight": "shared.weight",
            },
        ),
        (
            "bert_mlm",
            {
                "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                "cls.predictions.decoder.bias": "cls.predictions.bias",
            },
        ),
    ],
)
def test_tied_tensors_are_known_though_stored_once(key: str, tied: dict[str, str]):
    assert saved(key).describe().tied == tied


def test_a_tied_tensor_stored_twice_points_at_the_other():
    model = saved("llama_tied")
    tensors = {**model.tensors, "lm_head.weight": model.tensors["model.embed_tokens.weight"]}
    infos = describe(headers_of(tensors), model.config).tensors
    assert infos["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert infos["lm_head.weight"].role is Role.OUTPUT
    assert infos["model.embed_tokens.weight"].tied_to is None


def test_of_tied_tensors_a_stored_one_stands_for_all():
    model = saved("llama_tied")
    tensors = dict(model.tensors)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    described = describe(headers_of(tensors), model.config)
    assert described.tied == {"model.embed_tokens.weight": "lm_head.weight"}
    assert described.tensors["lm_head.weight"].tied_to is None


def test_an_output_that_the_config_unties_stands_for_itself():
    """Flan-T5: an own lm_head, and `tie_word_embeddings: false`."""
    model = saved("t5")
    tensors = {**model.tensors, "lm_head.weight": torch.zeros(64, 32)}
    described = describe(headers_of(tensors), {**model.config, "tie_word_embeddings": False})
    head = described.tensors["lm_head.weight"]
    assert (head.role, head.tied_to, head.outside_backbone) == (Role.OUTPUT, None, True)
    assert described.tied["encoder.embed_tokens.weight"] == "shared.weight"


@pytest.mark.parametrize(
    ("key", "outside"),
    [
        ("bert", []),
        ("bert_classifier", ["classifier.bias", "classifier.weight"]),
        ("gpt2", []),
        ("gpt2_classifier", ["score.weight"]),
        ("llama", ["lm_head.weight"]),
        ("llama4", ["lm_head.weight"]),
        ("t5", []),
        ("vit", ["classifier.bias", "classifier.weight"]),
        ("clip", []),
        ("clip_classifier", ["classifier.bias", "classifier.weight"]),
    ],
)
def test_what_lies_outside_the_backbone(key: str, outside: list[str]):
    infos = saved(key).describe().tensors
    assert sorted(name for name, info in infos.items() if info.outside_backbone) == outside


@pytest.mark.parametrize(
    ("key", "prefix", "family", "architecture"),
    [
        ("bert", "bert", "bert", "BertModel"),
        ("bert_classifier", "bert", "bert", "BertForSequenceClassification"),
        ("gpt2", "transformer", "gpt2", "GPT2LMHeadModel"),
        ("llama4", "model", "llama4_text", "Llama4ForCausalLM"),
        ("t5", "transformer", "t5", "T5ForConditionalGeneration"),
    ],
)
def test_the_model_as_a_whole(key: str, prefix: str, family: str, architecture: str):
    described = saved(key).describe()
    assert (described.prefix, described.family) == (prefix, family)
    assert described.architecture == architecture


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (None, None),
        ({"hidden_size": 8}, None),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "roberta"}, "roberta-base"),
        ({"model_type": "roberta", "hidden_size": 768}, "roberta-base"),
        ({"model_type": "roberta", "hidden_size": 1024}, "roberta-large"),
        ({"model_type": "roberta", "hidden_size": 512}, "roberta"),
    ],
)
def test_family(config: dict[str, object] | None, family: str | None):
    assert family_of(config) == family


def test_names_with_or_without_the_prefix_are_the_same_tensors():
    """The first GPT-2 files on the hub have no `transformer.`, and hold attention masks."""
    model = saved("gpt2")
    bare = {name.removeprefix("transformer."): t for name, t in model.tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    described = describe(headers_of(bare), model.config)
    with_prefix = model.describe().tensors
    masks = {name for name in bare if "transformer." + name not in with_prefix}
    for name, info in described.tensors.items():
        assert not info.outside_backbone
        expected = Role.BUFFER if name in masks else with_prefix["transformer." + name].role
        assert info.role is expected
    assert described.tied == {"lm_head.weight": "wte.weight"}
    assert described.notes == ()


def test_an_encoder_with_its_classifier_described_by_the_encoders_config():
    """A head that the architecture lacks goes by its name, and lies outside."""
    model = saved("bert_classifier")
    config = {**model.config, "architectures": ["BertModel"]}
    described = describe(model.headers, config)
    assert described.tensors["bert.pooler.dense.weight"].why == "module class Linear"
    assert not described.tensors["bert.pooler.dense.weight"].outside_backbone
    assert described.tensors["classifier.weight"].role is LINEAR
    assert described.tensors["classifier.weight"].outside_backbone
    assert "'classifier.bias' and 1 more: not in BertModel" in described.notes[0]


def test_old_names_of_norms_are_known():
    model = saved("bert")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in model.tensors.items()
    }
    described = describe(headers_of(old), model.config)
    assert described.tensors["embeddings.LayerNorm.gamma"].why == "module class LayerNorm"
    assert described.notes == ()


def test_packed_experts_in_the_models_own_form():
    """Mixtral stored as its modules have it, not one matrix per expert."""
    model = saved("mixtral")
    tensors = {name: tensor.detach() for name, tensor in model.model.state_dict().items()}
    info = describe(headers_of(tensors), model.config).tensors[
        "model.layers.0.mlp.experts.gate_up_proj"
    ]
    assert info.role is STACK
    assert info.layout == MatrixLayout(stacked=True)


@pytest.mark.parametrize(("rows", "columns", "transposed"), [(96, 32, False), (32, 96, True)])
def test_a_transpose_on_loading_turns_the_orientation(rows: int, columns: int, transposed: bool):
    """Qwen3-VL-MoE is stored (experts, d_in, d_out) at first, and as its modules have it later."""
    config = {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {
            "hidden_size": 32,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_experts": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 64,
        },
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 32},
    }
    headers = shapes(
        model__language_model__layers__0__mlp__experts__gate_up_proj=(2, rows, columns)
    )
    described = describe(headers, config)
    (info,) = described.tensors.values()
    assert info.role is STACK, described.notes
    assert info.layout == MatrixLayout(transposed=transposed, stacked=True)


def test_integers_are_buffers_whatever_their_module():
    model = saved("bert")
    headers = model.headers
    headers["pooler.dense.weight"] = TensorHeader("pooler.dense.weight", (32, 32), torch.int8)
    headers["embeddings.position_ids"] = TensorHeader(
        "embeddings.position_ids", (1, 16), torch.int64
    )
    infos = describe(headers, model.config).tensors
    assert infos["pooler.dense.weight"].role is Role.BUFFER
    assert infos["embeddings.position_ids"].role is Role.BUFFER


def test_shapes_that_the_config_does_not_mean_are_noted():
    model = saved("bert")
    headers = model.headers
    headers["pooler.dense.weight"] = TensorHeader("pooler.dense.weight", (8, 32), torch.float32)
    headers["encoder.layer.0.intermediate.dense.weight"] = TensorHeader(
        "encoder.layer.0.intermediate.dense.weight", (1536,), torch.float32
    )
    described = describe(headers, model.config)
    packed = described.tensors["encoder.layer.0.intermediate.dense.weight"]
    assert packed.role is Role.OTHER
    assert packed.why == "module class Linear, but stored [1536] instead of [48, 32]"
    assert described.tensors["pooler.dense.weight"].role is LINEAR
    notes = "\n".join(described.notes)
    assert "stored [8, 32], while config.json means [32, 32]" in notes
    assert "'encoder.layer.0.intermediate.dense.weight': module class Linear, but stored" in notes


def test_a_70b_llama_is_described_at_once():
    saved("llama").describe()  # imports transformers' Llama
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    headers = shapes(model__layers__79__mlp__up_proj__weight=(28672, 8192))
    start = time.thread_time()  # its own work, whatever else the machine does: 0.2 to 0.5 s
    (info,) = describe(headers, config).tensors.values()
    assert time.thread_time() - start < 4  # weights would take 140 GB and minutes
    assert info.role is LINEAR
