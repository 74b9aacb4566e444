"""What a tensor is, and how it holds matrices `(d_out, d_in)`."""

from covmerge.tensors.describe import (
    ModelDescription,
    TensorInfo,
    conv1d_names,
    describe,
    describe_checkpoint,
    family_of,
)
from covmerge.tensors.views import (
    FusedParts,
    MatrixLayout,
    matrices,
    matrix_shapes,
    write_matrices,
)

__all__ = [
    "FusedParts",
    "MatrixLayout",
    "ModelDescription",
    "TensorInfo",
    "conv1d_names",
    "describe",
    "describe_checkpoint",
    "family_of",
    "matrices",
    "matrix_shapes",
    "write_matrices",
]
