import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covmerge.errors import TensorError
from covmerge.files.tensors.views import (
    FusedParts,
    MatrixLayout,
    matrices,
    matrix_shapes,
    write_matrices,
)

small = st.integers(1, 4)


@st.composite
def tensors_with_layouts(draw: st.DrawFn) -> tuple[torch.Tensor, MatrixLayout]:
    transposed, stacked, split = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    sizes = tuple(draw(st.lists(small, min_size=1, max_size=3)))
    parts = FusedParts(tuple("qkv"[: len(sizes)]), sizes, draw(small)) if split else None
    d_out = sum(parts.rows) if parts else draw(small)
    # a kernel's window belongs to the second stored axis, whichever that is
    window = [1, draw(small)] if not stacked and draw(st.booleans()) else []
    if transposed:
        shape = [draw(small), d_out, 1] if window else [draw(small), d_out]
    else:
        shape = [d_out, draw(small), *window]
    shape = [draw(small), *shape] if stacked else shape
    tensor = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    return tensor, MatrixLayout(transposed, stacked, parts)


@given(tensors_with_layouts())
def test_matrices_cover_the_tensor_exactly_once(case: tuple[torch.Tensor, MatrixLayout]):
    tensor, layout = case
    found = matrices(tensor, layout)
    assert torch.cat([m.flatten() for m in found]).sort().values.equal(tensor.flatten())


@given(tensors_with_layouts())
def test_shapes_are_known_without_a_tensor(case: tuple[torch.Tensor, MatrixLayout]):
    tensor, layout = case
    found = tuple(tuple(m.shape) for m in matrices(tensor, layout))
    assert found == matrix_shapes(tensor.shape, layout)


@given(tensors_with_layouts())
def test_write_inverts_matrices(case: tuple[torch.Tensor, MatrixLayout]):
    tensor, layout = case
    written = torch.full_like(tensor, -1)
    write_matrices(written, layout, matrices(tensor, layout))
    assert written.equal(tensor)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((4, 6), MatrixLayout()),
        ((6, 4), MatrixLayout(transposed=True)),
        ((3, 4, 6), MatrixLayout(stacked=True)),
        ((3, 6, 4), MatrixLayout(stacked=True, transposed=True)),
        ((4, 3, 5, 5), MatrixLayout()),
        ((6, 4), MatrixLayout(parts=FusedParts(("q", "k", "v"), (4, 1, 1)))),
        ((2, 4, 6), MatrixLayout(True, True, FusedParts(("gate", "up"), (1, 1), groups=3))),
    ],
)
def test_all_but_head_interleaved_parts_are_views(shape: tuple[int, ...], layout: MatrixLayout):
    tensor = torch.zeros(shape)
    for matrix in matrices(tensor, layout):
        matrix += 1
    assert tensor.equal(torch.ones(shape))


def test_parts_interleaved_by_head_are_gathered():
    # two heads; rows q0 k0 v0 q1 k1 v1
    tensor = torch.arange(6.0).unsqueeze(1)
    layout = MatrixLayout(parts=FusedParts(("q", "k", "v"), (1, 1, 1), groups=2))
    q, k, v = matrices(tensor, layout)
    assert (q.flatten().tolist(), k.flatten().tolist(), v.flatten().tolist()) == (
        [0, 3],
        [1, 4],
        [2, 5],
    )


def test_writing_rounds_to_the_stored_dtype():
    stored = torch.zeros(1, 2, dtype=torch.bfloat16)
    write_matrices(stored, MatrixLayout(), [torch.tensor([[1.0, 1.001]])])
    assert stored.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        ((4,), MatrixLayout(), r"\[4\] holds no matrix"),
        ((4, 6), MatrixLayout(stacked=True), r"three axes, but the tensor is \[4, 6\]"),
        (
            (7, 6),
            MatrixLayout(parts=FusedParts(("q", "k", "v"), (2, 2, 2))),
            r"parts q, k, v of 2\+2\+2 rows do not make up the 7 rows .* \[7, 6\]",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_named(
    shape: tuple[int, ...], layout: MatrixLayout, message: str
):
    with pytest.raises(TensorError, match=message):
        matrix_shapes(shape, layout)
    with pytest.raises(TensorError, match=message):
        matrices(torch.zeros(shape), layout)


def test_a_strided_kernel_is_refused_rather_than_copied():
    kernel = torch.zeros(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    with pytest.raises(TensorError, match=r"\.contiguous\(\) first"):
        matrices(kernel, MatrixLayout())


@pytest.mark.parametrize("values", [[], [torch.zeros(6, 4)], [torch.zeros(4, 6)] * 2])
def test_writing_other_shapes_is_refused(values: list[torch.Tensor]):
    with pytest.raises(TensorError, match=r"were given to be written"):
        write_matrices(torch.zeros(4, 6), MatrixLayout(), values)
