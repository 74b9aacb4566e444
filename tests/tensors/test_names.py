import pytest
import torch

from covmerge.base.types import Role, TensorHeader
from covmerge.files.tensors.describe import describe
from covmerge.files.tensors.views import FusedParts, MatrixLayout
from tests.tensors.models import headers_of, saved, shapes

# Names as they are in the wild: (name, shape, role)
IN_THE_WILD = [
    # open_clip
    ("transformer.resblocks.0.attn.in_proj_weight", (96, 32), Role.LINEAR),
    ("transformer.resblocks.0.attn.in_proj_bias", (96,), Role.BIAS),
    ("transformer.resblocks.0.mlp.c_fc.weight", (128, 32), Role.LINEAR),
    ("transformer.resblocks.0.mlp.c_proj.weight", (32, 128), Role.LINEAR),
    ("transformer.resblocks.0.ln_1.bias", (32,), Role.NORM),
    ("ln_final.weight", (32,), Role.NORM),
    ("visual.ln_pre.weight", (32,), Role.NORM),
    ("visual.conv1.weight", (32, 3, 4, 4), Role.CONV),
    ("visual.class_embedding", (32,), Role.OTHER),
    ("visual.positional_embedding", (5, 32), Role.EMBEDDING),
    ("positional_embedding", (77, 32), Role.EMBEDDING),
    ("token_embedding.weight", (64, 32), Role.EMBEDDING),
    ("visual.proj", (32, 16), Role.OTHER),
    ("text_projection", (32, 16), Role.OTHER),
    ("logit_scale", (), Role.OTHER),
    # timm
    ("blocks.0.attn.qkv.weight", (96, 32), Role.LINEAR),
    ("patch_embed.proj.weight", (32, 3, 4, 4), Role.CONV),
    ("pos_embed", (1, 5, 32), Role.OTHER),
    ("cls_token", (1, 1, 32), Role.OTHER),
    ("head.weight", (10, 32), Role.LINEAR),
    ("layer1.0.bn1.running_mean", (32,), Role.BUFFER),
    # diffusers
    ("transformer_blocks.0.norm1.linear.weight", (96, 32), Role.LINEAR),
    ("transformer_blocks.0.norm1.linear.bias", (96,), Role.BIAS),
    ("transformer_blocks.0.norm1.norm.weight", (32,), Role.NORM),
    ("down_blocks.0.resnets.0.conv1.weight", (32, 32, 3, 3), Role.CONV),
    ("time_embedding.linear_1.weight", (32, 32), Role.LINEAR),
    ("x_embedder.weight", (32, 16), Role.LINEAR),
    # Mamba
    ("layers.0.mixer.conv1d.weight", (64, 1, 4), Role.CONV),
    ("layers.0.mixer.A_log", (64, 16), Role.OTHER),
    # T5, BERT with its masked language model
    ("encoder.block.0.layer.0.SelfAttention.q.weight", (32, 32), Role.LINEAR),
    ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (32, 4), "embedding"),
    ("cls.predictions.decoder.weight", (64, 32), Role.OUTPUT),
    ("bert.embeddings.LayerNorm.gamma", (32,), Role.NORM),
    # GPT-2's and GPT-NeoX's masks
    ("h.0.attn.bias", (1, 1, 16, 16), Role.BUFFER),
    ("gpt_neox.layers.0.attention.masked_bias", (), Role.BUFFER),
    # modules of sentence-transformers
    ("1_CNN.convs.1.weight", (16, 32, 3), Role.CONV),
    ("emb_layer.weight", (64, 32), Role.EMBEDDING),
    # a recurrent layer: known to nobody here
    ("lstm.weight_ih_l0", (64, 32), Role.OTHER),
]


@pytest.mark.parametrize(("name", "shape", "role"), IN_THE_WILD)
def test_names_in_the_wild(name: str, shape: tuple[int, ...], role: Role):
    info = describe({name: TensorHeader(name, shape, torch.float32)}, None).tensors[name]
    assert info.role == role
    assert info.layout == MatrixLayout()


def test_the_reason_names_the_rule():
    described = describe(shapes(ln_1__weight=(8,), strange=(2, 3)), None)
    assert described.tensors["ln_1.weight"].why == "name rule 'norm'"
    assert described.tensors["strange"].why == "no name rule"
    assert described.source == "names"
    assert described.notes == ("there is no config.json: roles come from name rules",)


def test_gpt2_blocks_lie_transposed_only_beside_their_own_c_attn():
    headers = shapes(
        h__0__attn__c_attn__weight=(8, 24),
        h__0__attn__c_proj__weight=(8, 8),
        h__0__mlp__c_fc__weight=(8, 32),
        h__0__mlp__c_proj__weight=(32, 8),
        # nanoGPT has the names, but linear layers
        nano__0__attn__c_attn__weight=(24, 8),
        nano__0__attn__c_proj__weight=(8, 8),
        # open_clip
        resblocks__0__mlp__c_fc__weight=(32, 8),
    )
    roles = {name: info.role for name, info in describe(headers, None).tensors.items()}
    assert [roles[name] for name in headers] == [Role.CONV1D] * 4 + [Role.LINEAR] * 3


def test_q_k_v_of_a_fused_projection_by_name():
    headers = shapes(
        h__0__attn__c_attn__weight=(8, 24),
        blocks__0__attn__qkv__weight=(24, 8),
        attn__in_proj_weight=(24, 8),
        grouped__attn__qkv__weight=(16, 8),
    )
    infos = describe(headers, None).tensors.values()
    thirds = FusedParts(("q", "k", "v"), (8, 8, 8))
    assert [info.parts for info in infos] == [thirds, thirds, thirds, None]


def test_a_root_level_head_is_an_output_only_beside_an_embedding_of_its_shape():
    language = describe(shapes(emb__weight=(64, 8), head__weight=(64, 8)), None).tensors
    vision = describe(shapes(head__weight=(10, 8)), None).tensors
    assert language["head.weight"].role is Role.OUTPUT
    assert vision["head.weight"].role is Role.LINEAR
    assert vision["head.weight"].outside_backbone


@pytest.mark.parametrize(
    ("gate_up", "down", "transposed"),
    [((2, 96, 32), (2, 32, 48), False), ((2, 32, 96), (2, 48, 32), True)],
)
def test_packed_experts_tell_their_orientation(
    gate_up: tuple[int, ...], down: tuple[int, ...], transposed: bool
):
    headers = shapes(mlp__experts__gate_up_proj=gate_up, mlp__experts__down_proj=down)
    for info in describe(headers, None).tensors.values():
        assert info.role is Role.EXPERT_STACK
        assert info.layout == MatrixLayout(transposed=transposed, stacked=True)


def test_a_stack_whose_orientation_cannot_be_told_is_left_elementwise_and_noted():
    headers = shapes(mlp__experts__up_proj=(2, 32, 32), mlp__experts__down_proj=(2, 32, 32))
    described = describe(headers, None)
    assert {info.role for info in described.tensors.values()} == {Role.OTHER}
    assert "'mlp.experts.up_proj' and 1 more: stack of experts" in described.notes[1]


def test_numbers_that_are_no_floats_are_buffers():
    headers = {"w.weight": TensorHeader("w.weight", (4, 4), torch.int8)}
    info = describe(headers, None).tensors["w.weight"]
    assert (info.role, info.why) == (Role.BUFFER, "dtype int8")


@pytest.mark.parametrize(
    "key",
    [
        *("bert_classifier", "bert_mlm", "roberta", "gpt2", "gpt2_cross", "gpt2_classifier"),
        *("llama", "mixtral", "qwen3_moe", "gpt_oss", "llama4", "phi3", "gpt_neox", "bloom"),
        *("mpt", "t5", "vit", "clip"),
    ],
)
def test_names_agree_with_modules(key: str):
    """The same state dicts without their config."""
    model = saved(key)
    by_modules = model.describe().tensors
    by_names = describe(headers_of(model.tensors), None).tensors
    for name, info in by_names.items():
        assert info.role == by_modules[name].role, name
        assert info.layout == by_modules[name].layout, name
        assert info.outside_backbone == by_modules[name].outside_backbone, name


def test_the_golden_names():
    headers = shapes(
        blocks__0__attn__out_proj__weight=(48, 32),
        blocks__0__mlp__c_fc__weight=(32, 96),
        blocks__0__mlp__c_proj__weight=(64, 64),
        token_embedding__weight=(100, 32),
        blocks__0__attn__out_proj__bias=(48,),
    )
    infos = describe(headers, None).tensors.values()
    assert [info.role for info in infos] == [Role.LINEAR] * 3 + [Role.EMBEDDING, Role.BIAS]
    assert {info.layout for info in infos} == {MatrixLayout()}
