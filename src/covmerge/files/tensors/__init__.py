"""What a tensor is, and how it holds matrices `(d_out, d_in)`."""

from covmerge.files.tensors.describe import (
    ModelDescription,
    TensorInfo,
    conv1d_names,
    describe,
    describe_checkpoint,
    family_of,
)
from covmerge.files.tensors.donor import Donor
from covmerge.files.tensors.layers import LayerName, layer_name, relative_depth, relative_depths
from covmerge.files.tensors.names import find_name
from covmerge.files.tensors.stacked import Stacked, comes_before
from covmerge.files.tensors.untied import (
    TIED,
    Untied,
    same_values,
    seen_untied,
    untied_config,
)
from covmerge.files.tensors.views import (
    FusedParts,
    MatrixLayout,
    matrices,
    matrix_shapes,
    write_matrices,
)

__all__ = [
    "TIED",
    "Donor",
    "FusedParts",
    "LayerName",
    "MatrixLayout",
    "ModelDescription",
    "Stacked",
    "TensorInfo",
    "Untied",
    "comes_before",
    "conv1d_names",
    "describe",
    "describe_checkpoint",
    "family_of",
    "find_name",
    "layer_name",
    "matrices",
    "matrix_shapes",
    "relative_depth",
    "relative_depths",
    "same_values",
    "seen_untied",
    "untied_config",
    "write_matrices",
]
