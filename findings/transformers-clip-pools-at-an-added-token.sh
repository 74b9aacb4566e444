#!/usr/bin/env bash
# transformers 5.23.0: CLIP's text encoder with the eos_token_id of its published configurations (2) pools at an added token, not at the end.
#
# Expected: a text's vector is taken at its end token, also where tokens were added, as textual inversion adds them.
# Seen: with eos_token_id 2, which openai's configurations and those made of them have, the vector is taken where the id is highest.
#   That is the end token (49407; 99 here) until a token is added: then it is the added one, and with the causal mask nothing that
#   follows moves the vector any more. Two texts that differ behind it have one vector. Nothing is said.
# So: write eos_token_id 49407 into the configuration of a merge before tokens are added, and compare with texts without them.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
venv/bin/python - 2> log <<'PY' || { cat log; exit 1; }
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

seen = {}
for end in (2, 99):
    torch.manual_seed(0)
    model = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=100, hidden_size=32, projection_dim=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            bos_token_id=98, eos_token_id=end,
        )
    ).eval()
    model.resize_token_embeddings(101)
    for added in (25, 100):
        texts = torch.tensor([[98, 20, added, word, 99] for word in (29, 68)])
        with torch.no_grad():
            cat, dog = model(texts).text_embeds
        seen[end, "an added token" if added == 100 else "without"] = round(float((cat - dog).norm() / cat.norm()), 3)
print("how far two texts are apart that differ in their last word, by eos_token_id:", seen)
assert seen[2, "an added token"] == 0, seen
assert min(seen[2, "without"], seen[99, "without"], seen[99, "an added token"]) > 0.01, seen
PY
! grep -qiE "eos|pool" log || { cat log; exit 1; }
