"""How a stored tensor holds matrices `(d_out, d_in)`, and how to read and write them there.

A method only sees matrices whose rows are outputs and whose columns are inputs. The file may hold the
transpose (GPT-2), a stack with one matrix per expert, a convolution kernel, or several projections in one
(q, k and v). `MatrixLayout` describes all of these. Reading and writing both use the function `_blocks`,
so that they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from torch import Tensor

from covmerge.base.errors import TensorError
from covmerge.base.text import some


@dataclass(frozen=True)
class FusedParts:
    """How the rows of one matrix belong to several projections.

    The rows are `groups` equal blocks; each block holds `sizes[p]` rows of every part p, in order. With one
    group, the parts lie one after another. With one group per head, they are interleaved head by head
    (GPT-NeoX). With sizes of one row, they alternate row by row (GPT-OSS).

    Example:
        >>> FusedParts(("q", "k", "v"), (8, 4, 4)).rows
        (8, 4, 4)
        >>> FusedParts(("q", "k", "v"), (2, 2, 2), groups=4).rows
        (8, 8, 8)
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: int = 1

    @property
    def rows(self) -> tuple[int, ...]:
        """Total number of rows of each part."""
        return tuple(size * self.groups for size in self.sizes)


@dataclass(frozen=True)
class MatrixLayout:
    """How a stored tensor holds matrices `(d_out, d_in)`."""

    # Whether each matrix is stored as `(d_in, d_out)`: GPT-2's Conv1D, some expert stacks.
    transposed: bool = False
    # Whether the first axis counts matrices: the experts of a mixture of experts.
    stacked: bool = False
    # How the rows of each oriented matrix split into projections; None: one matrix.
    parts: FusedParts | None = None


def matrix_shapes(shape: Sequence[int], layout: MatrixLayout) -> tuple[tuple[int, int], ...]:
    """Return the `(d_out, d_in)` of every matrix in a tensor of this shape, in `matrices`' order.

    Raises:
        TensorError: the layout does not fit the shape.

    Example:
        >>> matrix_shapes((8, 6), MatrixLayout(transposed=True))
        ((6, 8),)
        >>> matrix_shapes((2, 6, 8), MatrixLayout(stacked=True))
        ((6, 8), (6, 8))
        >>> matrix_shapes((16, 3, 5, 5), MatrixLayout())
        ((16, 75),)
    """
    count, first, second = _flat_shape(shape, layout)
    d_out, d_in = (second, first) if layout.transposed else (first, second)
    parts = _checked_parts(layout, d_out, shape)
    return tuple((rows, d_in) for rows in (parts.rows if parts else (d_out,))) * count


def matrices(tensor: Tensor, layout: MatrixLayout) -> tuple[Tensor, ...]:
    """Return every matrix of a stored tensor as `(d_out, d_in)`: expert by expert, part by part.

    A convolution kernel `(c_out, c_in, *window)` is unfolded to `(c_out, c_in · window)`.

    They are views of the tensor, except for parts interleaved head by head. The rows of such parts are no
    strided matrix, so copies are returned. To write, use `write_matrices`, which works for every layout.

    Raises:
        TensorError: the layout does not fit the shape, or a kernel is not contiguous.
    """
    return tuple(block.flatten(0, -2) for block in _blocks(tensor, layout))


def write_matrices(tensor: Tensor, layout: MatrixLayout, values: Sequence[Tensor]) -> None:
    """Write matrices into a stored tensor: the inverse of `matrices`, with a cast to the tensor's dtype.

    Raises:
        TensorError: the number of matrices, or a shape, differs from the layout's.
    """
    shapes = matrix_shapes(tensor.shape, layout)
    given = tuple(tuple(value.shape) for value in values)
    if given != shapes:
        raise TensorError(
            f"a tensor {list(tensor.shape)} with {layout} holds matrices of shapes "
            f"{_counted(shapes)}, but {_counted(given)} were given to be written to it."
        )
    for block, value in zip(_blocks(tensor, layout), values, strict=True):
        block.copy_(value.reshape(block.shape))


def _blocks(tensor: Tensor, layout: MatrixLayout) -> tuple[Tensor, ...]:
    """Return views that cover the tensor once: `(groups, rows, d_in)` for parts, else `(d_out, d_in)`."""
    count, first, second = _flat_shape(tensor.shape, layout)
    stack = tensor
    if not layout.stacked:
        kernel = tensor.ndim > 2
        if kernel and not tensor.is_contiguous():
            raise TensorError(
                f"a kernel {list(tensor.shape)} with strides {list(tensor.stride())} cannot be "
                "seen as a matrix without a copy: pass it through .contiguous() first."
            )
        stack = (tensor.view(first, second) if kernel else tensor).unsqueeze(0)
    oriented = stack.transpose(1, 2) if layout.transposed else stack
    parts = _checked_parts(layout, oriented.shape[1], tensor.shape)
    if parts is None:
        return tuple(oriented.unbind(0))
    starts = (0, *accumulate(parts.sizes))
    grouped = oriented.view(count, parts.groups, starts[-1], oriented.shape[2])
    return tuple(
        grouped[expert, :, start : start + size]
        for expert in range(count)
        for start, size in zip(starts, parts.sizes, strict=False)
    )


def _flat_shape(shape: Sequence[int], layout: MatrixLayout) -> tuple[int, int, int]:
    """Return the number of matrices and the sizes of their two stored axes, with kernels unfolded."""
    if layout.stacked:
        if len(shape) != 3:
            raise TensorError(
                f"a stack of matrices has three axes, but the tensor is {list(shape)}."
            )
        return shape[0], shape[1], shape[2]
    if len(shape) < 2:
        raise TensorError(f"a tensor {list(shape)} holds no matrix: it has fewer than two axes.")
    return 1, shape[0], prod(shape[1:])


def _checked_parts(layout: MatrixLayout, d_out: int, shape: Sequence[int]) -> FusedParts | None:
    parts = layout.parts
    if parts is not None and sum(parts.rows) != d_out:
        raise TensorError(
            f"parts {', '.join(parts.names)} of {'+'.join(map(str, parts.rows))} rows do not make "
            f"up the {d_out} rows of a matrix in a tensor {list(shape)}."
        )
    return parts


def _counted(shapes: Sequence[tuple[int, ...]]) -> str:
    return some(str(list(shape)) for shape in shapes) or "none"
