"""Numbers: what `matrices` calls (d_out, d_in) is what the model multiplies by."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from covmerge.base.types import Role
from covmerge.files.tensors.views import FusedParts, matrices, write_matrices
from tests.tensors.models import MODELS, Saved, saved


@pytest.mark.parametrize("key", MODELS)
@torch.no_grad()
def test_linear_layers(key: str):
    model = saved(key)
    checked = 0
    for name, info in model.describe().tensors.items():
        owner, _, leaf = name.rpartition(".")
        modules = dict(model.model.named_modules())
        if info.role not in (Role.LINEAR, Role.CONV1D) or leaf != "weight":
            continue
        if owner not in modules or type(modules[owner]).__name__.endswith("Router"):
            continue  # pieces of packed experts and bare parameters: below
        (weight,) = matrices(model.tensors[name], info.layout)
        x = torch.randn(5, weight.shape[1])
        bias = getattr(modules[owner], "bias", None)
        expected = x @ weight.T + (0 if bias is None else bias)
        torch.testing.assert_close(modules[owner](x), expected, msg=name)
        checked += 1
    assert checked


def all_to_expert(experts: Callable[..., Tensor], x: Tensor, expert: int) -> Tensor:
    """Send every token to one expert, with weight 1."""
    index = torch.full((len(x), 1), expert)
    return experts(x, index, torch.ones(len(x), 1))


@torch.no_grad()
def test_experts_stored_one_by_one():
    for key, block, gate, up, down in [
        ("mixtral", "model.layers.0.block_sparse_moe.experts", "w1", "w3", "w2"),
        ("qwen3_moe", "model.layers.0.mlp.experts", "gate_proj", "up_proj", "down_proj"),
    ]:
        model = saved(key)
        infos = model.describe().tensors
        x = torch.randn(5, 32)
        for expert in range(2):
            names = [f"{block}.{expert}.{part}.weight" for part in (gate, up, down)]
            (g,), (u,), (d,) = (matrices(model.tensors[n], infos[n].layout) for n in names)
            expected = (silu(x @ g.T) * (x @ u.T)) @ d.T
            actual = all_to_expert(model.model.model.layers[0].mlp.experts, x, expert)
            torch.testing.assert_close(actual, expected)


def stacks(model: Saved, block: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Gate and up of every expert, split, and down of every expert."""
    infos = model.describe().tensors
    gate_up, down = infos[f"{block}.gate_up_proj"], infos[f"{block}.down_proj"]
    assert gate_up.role is down.role is Role.EXPERT_STACK
    split = type(gate_up.layout)(gate_up.layout.transposed, True, gate_up.parts)
    return (
        matrices(model.tensors[f"{block}.gate_up_proj"], split),
        matrices(model.tensors[f"{block}.down_proj"], down.layout),
    )


@torch.no_grad()
def test_gpt_oss_stacks_lie_transposed_with_gate_and_up_alternating():
    model = saved("gpt_oss")
    gate_up, down = stacks(model, "model.layers.0.mlp.experts")
    experts = model.model.model.layers[0].mlp.experts
    x = torch.randn(5, 32)
    for expert in range(2):
        gate, up = (x @ m.T for m in gate_up[2 * expert : 2 * expert + 2])
        gate = gate + experts.gate_up_proj_bias[expert, 0::2]
        up = up + experts.gate_up_proj_bias[expert, 1::2]
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        hidden = (up + 1) * gate * torch.sigmoid(gate * experts.alpha)
        expected = hidden @ down[expert].T + experts.down_proj_bias[expert]
        torch.testing.assert_close(all_to_expert(experts, x, expert), expected)


@torch.no_grad()
def test_llama4_stacks_lie_transposed_with_gate_before_up():
    model = saved("llama4")
    gate_up, down = stacks(model, "model.layers.0.feed_forward.experts")
    x = torch.randn(2, 5, 32)  # sorted by expert
    expected = [
        (silu(x[e] @ gate_up[2 * e].T) * (x[e] @ gate_up[2 * e + 1].T)) @ down[e].T
        for e in range(2)
    ]
    experts = model.model.model.layers[0].feed_forward.experts
    torch.testing.assert_close(experts(x.flatten(0, 1)), torch.cat(expected))


# model, fused weight, module whose input is the attention's result
FUSED_ATTENTION = [
    ("gpt2", "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"),
    (
        "gpt_neox",
        "gpt_neox.layers.0.attention.query_key_value",
        "gpt_neox.layers.0.attention.dense",
    ),
    ("phi3", "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"),
    *(
        (
            key,
            "transformer.h.0.self_attention.query_key_value",
            "transformer.h.0.self_attention.dense",
        )
        for key in ("bloom", "falcon_multi_query", "falcon_multi_head", "falcon_grouped")
    ),
    ("mpt", "transformer.blocks.0.attn.Wqkv", "transformer.blocks.0.attn.out_proj"),
    ("modernbert", "model.layers.0.attn.Wqkv", "model.layers.0.attn.Wo"),
]


@pytest.mark.parametrize(("key", "fused", "after"), FUSED_ATTENTION)
@torch.no_grad()
def test_q_k_and_v_of_fused_projections(key: str, fused: str, after: str):
    """Zero values give a zero result; zero queries, or keys, give the same even attention."""
    model = saved(key)
    weight = model.model.get_submodule(fused).weight
    info = next(i for n, i in model.describe().tensors.items() if n.endswith(f"{fused}.weight"))
    layout = type(info.layout)(info.layout.transposed, parts=info.parts)
    original = weight.clone()
    parts = matrices(original, layout)

    def attention_without(*zero: str) -> Tensor:
        assert info.parts is not None
        kept = [p * (n not in zero) for n, p in zip(info.parts.names, parts, strict=True)]
        write_matrices(weight, layout, [p * 50 for p in kept])  # sharp attention, if any
        results: list[Tensor] = []
        after_module = model.model.get_submodule(after)
        hook = after_module.register_forward_pre_hook(lambda _, args: results.append(args[0]))
        try:
            model.model(input_ids=torch.arange(3, 11).unsqueeze(0))
        finally:
            hook.remove()
            weight.copy_(original)
        return results[0]

    even = attention_without("q", "k")
    assert attention_without("v").count_nonzero() == 0
    assert even.count_nonzero() > 0
    torch.testing.assert_close(attention_without("q"), even)
    torch.testing.assert_close(attention_without("k"), even)
    assert not torch.allclose(attention_without(), even, rtol=1e-2)


@pytest.mark.parametrize(
    ("key", "name", "parts"),
    [
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", FusedParts(("gate", "up"), (48, 48))),
        (
            "gpt2_cross",
            "transformer.h.0.crossattention.c_attn.weight",
            FusedParts(("k", "v"), (32, 32)),
        ),
        ("modernbert", "model.layers.0.mlp.Wi.weight", FusedParts(("input", "gate"), (48, 48))),
        ("llama", "model.layers.0.mlp.up_proj.weight", None),
    ],
)
def test_other_fused_projections(key: str, name: str, parts: FusedParts | None):
    assert saved(key).describe().tensors[name].parts == parts


@torch.no_grad()
def test_convolution_kernels_unfold():
    model = saved("vit")
    name = "vit.embeddings.patch_embeddings.projection.weight"
    (weight,) = matrices(model.tensors[name], model.describe().tensors[name].layout)
    convolution = model.model.get_submodule(name.removesuffix(".weight"))
    x = torch.randn(1, 3, 4, 4)
    expected = x.flatten() @ weight.T + convolution.bias
    torch.testing.assert_close(convolution(x).flatten(), expected)
