#!/usr/bin/env bash
# sentence-transformers 6.2.0: a Router that was saved in bfloat16 loads with its Dense modules in float32.
#
# Expected: one dtype, as a model with the same modules and no Router has it, which encodes.
# Seen: the transformers of the routes are bfloat16, their Dense modules float32, and encoding stops with
#   "mat1 and mat2 must have the same dtype".
# So: call .to(torch.bfloat16) on the loaded model, or store it in float32.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 sentence-transformers==6.2.0
venv/bin/python - <<'PY'
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Pooling, Router, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BertModel(BertConfig(vocab_size=7, **sizes)).save_pretrained("bert")
BertTokenizerFast(vocab_file="vocab.txt").save_pretrained("bert")


def modules():
    return [Transformer("bert"), Pooling(16), Dense(16, 8)]


SentenceTransformer(modules=modules()).to(torch.bfloat16).save("plain")
router = Router.for_query_document(modules(), modules())
SentenceTransformer(modules=[router]).to(torch.bfloat16).save("router")

plain = SentenceTransformer("plain", device="cpu")
print("without a Router:", {str(p.dtype) for p in plain.parameters()}, plain.encode(["a b"]).shape)
routed = SentenceTransformer("router", device="cpu")
print("with one:", {str(p.dtype) for p in routed.parameters()})
assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
assert {p.dtype for p in routed.parameters()} == {torch.bfloat16, torch.float32}
try:
    routed.encode_query(["a b"])
except RuntimeError as error:
    print(error)
    assert "same dtype" in str(error)
else:
    raise SystemExit("it encodes now")
print("after .to(torch.bfloat16):", routed.to(torch.bfloat16).encode_query(["a b"]).shape)
PY
