"""Stored tensors that transformers' loader converts, with the operations it has for them."""

import pytest
import torch
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Conv3dToLinear,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from covmerge.base.types import Role, TensorHeader
from covmerge.files.tensors.modules import Kind, Place, place_of
from covmerge.files.tensors.views import FusedParts

QKV = ["attn.q.weight", "attn.k.weight", "attn.v.weight"]


class Mystery(ConversionOps):
    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        raise NotImplementedError


def place(
    role: Role,
    shape: tuple[int, ...],
    stored: tuple[int, ...],
    operations: list[ConversionOps],
    targets: list[str] | None = None,
    transposed: bool = False,
) -> Place:
    target = Place("parameter", Kind(role, "module class Foo", transposed), None, shape)
    header = TensorHeader("stored", stored, torch.float32)
    return place_of(target, header, WeightConverter("stored", targets or "p", operations))


@pytest.mark.parametrize(
    ("role", "shape", "stored", "operations", "expected"),
    [
        # one expert of a pack
        (Role.EXPERT_STACK, (2, 96, 32), (48, 32), [MergeModulelist(0), Concatenate(1)], False),
        (Role.EXPERT_STACK, (2, 32, 48), (48, 32), [MergeModulelist(0), Transpose(1, 2)], True),
        (Role.LINEAR, (4, 32), (32, 4), [Transpose(0, 1)], True),
        (Role.LINEAR, (4, 32), (32, 4), [Transpose(-1, -2)], True),
        # the loader transposes only what has another shape
        (Role.LINEAR, (4, 32), (4, 32), [Transpose(0, 1, check_dims=True)], False),
        (Role.LINEAR, (4, 32), (32, 4), [Transpose(0, 1, check_dims=True)], True),
    ],
)
def test_matrices_stored_apart_or_transposed(
    role: Role,
    shape: tuple[int, ...],
    stored: tuple[int, ...],
    operations: list[ConversionOps],
    expected: bool,
):
    kind = place(role, shape, stored, operations).kind
    assert (kind.role, kind.transposed) == (Role.LINEAR, expected)


def test_a_transposed_parameter_stored_transposed_lies_upright():
    kind = place(Role.EXPERT_STACK, (2, 32, 48), (2, 48, 32), [Transpose(1, 2)], None, True).kind
    assert (kind.role, kind.transposed) == (Role.EXPERT_STACK, False)


def test_what_is_chunked_on_loading_is_a_fused_projection():
    found = place(Role.LINEAR, (32, 32), (96, 32), [Chunk(0)], QKV)
    assert found.kind.role is Role.LINEAR
    assert found.parts == FusedParts(("q", "k", "v"), (32, 32, 32))


def test_kernels_stored_apart_or_for_a_linear_layer():
    assert place(Role.CONV, (96, 1, 4), (32, 1, 4), [Concatenate(0)]).kind.role is Role.CONV
    flattened = place(Role.LINEAR, (32, 48), (32, 3, 4, 2, 2), [Conv3dToLinear(3, (4, 2, 2))])
    assert (flattened.kind.role, flattened.kind.transposed) == (Role.CONV, False)


def test_biases_stored_apart_stay_biases():
    assert place(Role.BIAS, (96,), (32,), [Concatenate(0)]).kind.role is Role.BIAS
    assert place(Role.BIAS, (2, 48), (48,), [MergeModulelist(0)]).kind.role is Role.BIAS


def test_an_embedding_in_pieces_of_another_form_is_not_guessed_at():
    assert place(Role.EMBEDDING, (64, 8), (32, 8), [Concatenate(0)]).kind.role is Role.EMBEDDING
    for stored in [(2, 32, 8), (64,)]:
        kind = place(Role.EMBEDDING, (64, 8), stored, [Concatenate(0)]).kind
        assert (kind.role, kind.unsure) == (Role.OTHER, True)


@pytest.mark.parametrize("operation", [Mystery(), Transpose(0, 1)])
def test_an_unknown_operation_on_a_stack_is_not_guessed_at(operation: ConversionOps):
    kind = place(Role.EXPERT_STACK, (2, 96, 32), (96, 2, 32), [operation]).kind
    assert (kind.role, kind.unsure) == (Role.OTHER, True)
    assert "which covmerge does not know" in kind.why
