#!/usr/bin/env bash
# sentencepiece 0.2.3: pieces appended to a BPE model with score 0 are merged before all that it was trained with.
#
# Expected: a piece at the end of the list comes last, as merges of a tokenizer.json go by their place.
# Seen: BPE merges the pair with the highest score first, and trained scores are 0, -1, -2 ...: the usual recipe of
#   extending a vocabulary (score 0 for every new piece) cuts old texts anew, into
#   pieces that the embedding was never trained on. With scores below the last one old texts stay as they were.
# So: give appended pieces min(score) - 1, - 2, ... in their order.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet sentencepiece==0.2.3 protobuf==7.36.2
venv/bin/python - <<'PY'
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as format

lines = ["the quick brown fox and the other thing", "there is something here that they know"] * 100
with open("text.txt", "w") as file:
    file.write("\n".join(lines))
sentencepiece.SentencePieceTrainer.train(input="text.txt", model_prefix="bpe", vocab_size=70, model_type="bpe", minloglevel=2)


with open("bpe.model", "rb") as file:
    trained = file.read()
last = min(piece.score for piece in format.ModelProto.FromString(trained).pieces)


def cut(*scores):
    model = format.ModelProto.FromString(trained)
    for piece, score in zip(("oth", "ot", "hek"), scores):
        model.pieces.add(piece=piece, score=score)
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString()).encode("the other thing", out_type=str)


seen = {"as trained": cut(), "score 0": cut(0, 0, 0), "below the last": cut(last - 1, last - 2, last - 3)}
print(seen)
assert seen["as trained"] == seen["below the last"] != seen["score 0"], seen
PY
