#!/usr/bin/env bash
# sentence-transformers 6.2.0: WordWeights reads its weights from its config and not from its file.
#
# Expected: a module that writes model.safetensors has the weights of that file when it is loaded.
# Seen: the file holds what was trained or merged, and load gives the weights of config.json back.
# So: a trained or merged WordWeights needs its values in config.json (`word_weights`) too.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 sentence-transformers==6.2.0
mkdir words
venv/bin/python - <<'PY'
from safetensors.torch import load_file
from sentence_transformers.models import WordWeights

module = WordWeights(vocab=["a", "b", "c"], word_weights={"a": 2.0, "b": 0.5})
module.emb_layer.weight.data += 1
module.save("words")
stored = load_file("words/model.safetensors")["emb_layer.weight"].flatten().tolist()
loaded = WordWeights.load("words").emb_layer.weight.flatten().tolist()
print("stored:", stored, "loaded:", loaded)
assert stored == [3.0, 1.5, 2.0]
assert loaded == [2.0, 0.5, 1.0]
PY
