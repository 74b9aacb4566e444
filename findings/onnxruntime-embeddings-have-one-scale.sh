#!/usr/bin/env bash
# onnxruntime 1.32.0: quantize_dynamic gives a whole embedding table one scale, with per_channel=True too.
#
# Expected: a scale for each row or column where per_channel is asked for, as the matrices have it.
# Seen: Gather is among the operators that it quantises, and its table has one scale whatever is asked for. One token whose row is
#   fifty times as long costs all others: they are off by 32 %,
#   without it by 1 %.
# So: leave Gather out (op_types_to_quantize=["MatMul"]), or look at the largest row first.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

drawn = np.random.default_rng(0)
table = (0.02 * drawn.standard_normal((1000, 64))).astype(np.float32)
weight = (0.1 * drawn.standard_normal((64, 64))).astype(np.float32)
ids = np.arange(100, 600)[None]
seen = {}
for name, longer in (("even rows", 1), ("one long row", 50)):
    rows = table.copy()
    rows[7] *= longer
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["hidden"]), helper.make_node("MatMul", ["hidden", "weight"], ["out"])],
        "embed",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, None])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, [1, None, 64]) for value in ("out", "hidden")],
        [numpy_helper.from_array(rows, "table"), numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, "float.onnx")
    for channels in (False, True):
        quantize_dynamic("float.onnx", "int8.onnx", weight_type=QuantType.QInt8, per_channel=channels)
        given = onnxruntime.InferenceSession("int8.onnx").run(["hidden"], {"ids": ids})[0]
        wrong = float(np.linalg.norm(given - rows[ids]) / np.linalg.norm(rows[ids]))
        scales = {each.name: numpy_helper.to_array(each).size for each in onnx.load("int8.onnx").graph.initializer}
        seen[name, channels] = {"off": round(wrong, 3), "scales": [scales["table_scale"], scales["weight_scale"]]}
print("embeddings of 500 other tokens, and how many scales table and matrix have, by rows and per_channel:", seen)
assert all(found["scales"] == [1, 64 if channels else 1] for (_, channels), found in seen.items()), seen
assert all(seen["even rows", channels]["off"] < 0.02 and seen["one long row", channels]["off"] > 0.2 for channels in (False, True)), seen
PY
