#!/usr/bin/env bash
# LM_Cocktail 0.0.4 with sentence-transformers 6.2.0: mix_models of two equal embedders with mean pooling is an embedder with CLS pooling.
#
# Expected: the mix of a model with itself is that model; its folder's modules say that it takes the mean over tokens.
# Seen: only the transformer is read, and for model_type="encoder" the result is written as a sentence-transformers folder with
#   pooling "cls" and a Normalize module, whatever the models had. A line says so and nothing asks. Of two hundred texts nearly
#   all have another nearest one than before.
# So: copy modules.json and the folders of pooling from one of the models, or mix with another tool.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.23.0 sentence-transformers==6.2.0 LM_Cocktail==0.0.4
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import numpy as np
import torch
from LM_Cocktail import mix_models
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(100)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
torch.manual_seed(0)
bert = BertModel(
    BertConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32,
    )
)
for parameter in bert.parameters():
    parameter.data += 0.1 * torch.randn_like(parameter)
bert.save_pretrained("bert")
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1").save_pretrained("bert")
drawn = np.random.default_rng(0)
texts = [" ".join(f"w{word}" for word in drawn.integers(4, 100, 8)) for _ in range(200)]


def nearest(folder):
    vectors = SentenceTransformer(folder, device="cpu").encode(texts, normalize_embeddings=True)
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    return vectors, likeness.argmax(1)


same = {}
for pooling in ("cls", "mean"):
    SentenceTransformer(modules=[Transformer("bert"), Pooling(32, pooling)], device="cpu").save(pooling)
    mix_models([pooling, pooling], model_type="encoder", weights=[0.5, 0.5], output_path=f"mix-of-{pooling}")
    (before, near), (after, now) = nearest(pooling), nearest(f"mix-of-{pooling}")
    same[pooling] = {"cosine": round(float((before * after).sum(1).mean()), 2), "nearest": float((near == now).mean())}
print("a mix of a model with itself beside the model, by the model's pooling:", same)
assert same["cls"]["cosine"] > 0.999 and same["cls"]["nearest"] > 0.98, same
assert same["mean"]["cosine"] < 0.95 and same["mean"]["nearest"] < 0.3, same
PY
