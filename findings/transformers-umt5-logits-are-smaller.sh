#!/usr/bin/env bash
# transformers 5.23.0: the logits of an umT5 are those of 4.57.1 divided by the root of its width.
#
# Expected: the same logits of the same folder.
# Seen: the released umT5 have a head of their own ("tie_word_embeddings": false), and 4.57.1 scales the outputs of
#   tied ones only. 5.23.0 takes every umT5 for tied, loads the head that is stored, and scales all the same.
#   The most likely token stays; losses, sampling and beam scores do not.
# So: multiply decoder.final_layer_norm.weight by the root of d_model for 5, or stay with the release of the training.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in old new; do python3 -m venv $name; done
old/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==4.57.1
new/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
cat > scale.py <<'PY'
import sys
import torch
import transformers
from transformers import UMT5Config, UMT5ForConditionalGeneration
transformers.logging.set_verbosity_error()
sizes = dict(vocab_size=64, d_model=64, d_kv=16, d_ff=48, num_layers=1, num_heads=4)
if sys.argv[1] == "save":
    torch.manual_seed(0)
    UMT5ForConditionalGeneration(UMT5Config(**sizes, tie_word_embeddings=False)).save_pretrained("model")
model = UMT5ForConditionalGeneration.from_pretrained("model").eval()
ids = torch.arange(1, 11)[None]
with torch.no_grad():
    print(float(model(input_ids=ids, decoder_input_ids=ids).logits.norm()))
PY
before=$(old/bin/python scale.py save 2> /dev/null)
after=$(new/bin/python scale.py load 2> /dev/null)
echo "the norm of the logits: $before in 4.57.1, $after in 5.23.0 (width 64)"
python3 -c "assert abs($before / $after - 8) < 1e-3, ($before, $after)"
