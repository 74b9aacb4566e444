import pytest
import torch
from torch import nn

from covmerge.base.types import Role
from covmerge.files.tensors.modules import kind_of_parameter
from covmerge.files.tensors.views import MatrixLayout, matrices


class FooExperts(nn.Module):
    def __init__(self, is_transposed: bool | None = None):
        super().__init__()
        self.down_proj = nn.Parameter(torch.zeros(2, 4, 6))
        self.down_proj_bias = nn.Parameter(torch.zeros(2, 6))
        if is_transposed is not None:
            self.is_transposed = is_transposed


class FooTopKRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 4))


class FooRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.bias = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(
    ("module", "leaf", "role", "transposed"),
    [
        (nn.Linear(2, 3), "weight", Role.LINEAR, False),
        (nn.Linear(2, 3), "bias", Role.BIAS, False),
        (nn.Embedding(2, 3), "weight", Role.EMBEDDING, False),
        (nn.Conv2d(2, 3, 5), "weight", Role.CONV, False),
        (nn.ConvTranspose1d(2, 3, 5), "weight", Role.CONV, True),
        (nn.LayerNorm(2), "weight", Role.NORM, False),
        (nn.LayerNorm(2), "bias", Role.NORM, False),
        (nn.BatchNorm1d(2), "weight", Role.NORM, False),
        (FooRMSNorm(), "weight", Role.NORM, False),
        (FooTopKRouter(), "weight", Role.LINEAR, False),
        (FooExperts(False), "down_proj", Role.EXPERT_STACK, False),
        (FooExperts(True), "down_proj", Role.EXPERT_STACK, True),
        (FooExperts(), "down_proj_bias", Role.BIAS, False),
        (nn.MultiheadAttention(4, 2), "in_proj_weight", Role.LINEAR, False),
        (nn.MultiheadAttention(4, 2), "in_proj_bias", Role.BIAS, False),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), "bias_k", Role.OTHER, False),
        (nn.Bilinear(2, 3, 4), "weight", Role.OTHER, False),
        (nn.PReLU(), "weight", Role.OTHER, False),
    ],
)
def test_parameters_by_module_class(module: nn.Module, leaf: str, role: Role, transposed: bool):
    kind = kind_of_parameter(module, leaf, getattr(module, leaf), is_output=False)
    assert (kind.role, kind.transposed) == (role, transposed)


def test_the_output_embedding_is_one_whatever_its_class():
    layer = nn.Linear(2, 3)
    assert kind_of_parameter(layer, "weight", layer.weight, is_output=True).role is Role.OUTPUT
    assert kind_of_parameter(layer, "bias", layer.bias, is_output=True).role is Role.BIAS


def test_a_stack_of_unknown_orientation_is_not_guessed():
    module = FooExperts()
    kind = kind_of_parameter(module, "down_proj", module.down_proj, is_output=False)
    assert (kind.role, kind.unsure) == (Role.OTHER, True)


@torch.no_grad()
def test_transposed_convolution_is_a_matrix_from_inputs_to_windows():
    module = nn.ConvTranspose1d(2, 3, 5, bias=False)
    (weight,) = matrices(module.weight, MatrixLayout(transposed=True))
    x = torch.randn(2, 1)
    torch.testing.assert_close(module(x).flatten(), (x.T @ weight.T).flatten())
