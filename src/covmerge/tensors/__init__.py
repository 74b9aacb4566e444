"""What a tensor is, and how it holds matrices `(d_out, d_in)`."""

from covmerge.tensors.describe import (
    ModelDescription,
    TensorInfo,
    conv1d_names,
    describe,
    describe_checkpoint,
    family_of,
)
from covmerge.tensors.layers import LayerName, layer_name, relative_depth, relative_depths
from covmerge.tensors.views import (
    FusedParts,
    MatrixLayout,
    matrices,
    matrix_shapes,
    write_matrices,
)

__all__ = [
    "FusedParts",
    "LayerName",
    "MatrixLayout",
    "ModelDescription",
    "TensorInfo",
    "conv1d_names",
    "describe",
    "describe_checkpoint",
    "family_of",
    "layer_name",
    "matrices",
    "matrix_shapes",
    "relative_depth",
    "relative_depths",
    "write_matrices",
]
