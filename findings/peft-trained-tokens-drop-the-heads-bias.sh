#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: trainable_token_indices takes the bias off a tied head of a masked language model, until it is merged.
#
# Expected: an adapter that has not been trained leaves the model's outputs as they are, merged or not.
# Seen: BERT's and RoBERTa's masked heads lose their bias while the adapter is there. Every logit is off by it, in training too.
#   merge_and_unload gives the bias back, so the merged model is not the one that was trained. RoBERTa has the bias on its
#   decoder as well, under a second name, and loses it all the same.
# So: compare the logits of a fresh adapter with the model's; train whole rows with modules_to_save in place of trained tokens.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import torch
from transformers import BertConfig, BertForMaskedLM, RobertaConfig, RobertaForMaskedLM

from peft import LoraConfig, get_peft_model

sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
given = torch.arange(2, 14).reshape(2, 6)
for build, config in ((BertForMaskedLM, BertConfig), (RobertaForMaskedLM, RobertaConfig)):
    torch.manual_seed(0)
    model = build(config(**sizes)).eval()
    bias = model.cls.predictions.bias if build is BertForMaskedLM else model.lm_head.bias
    torch.nn.init.normal_(bias)
    bias = bias.detach().clone()
    with torch.no_grad():
        plain = model(given).logits
        adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["query"], trainable_token_indices=[3, 5])).eval()
        fresh = adapted(given).logits
        merged = adapted.merge_and_unload()(given).logits
    print(f"{build.__name__}: a fresh adapter is {float((fresh - plain).abs().max()):.2f} off, and merged {float((merged - plain).abs().max()):.1e}")
    assert torch.allclose(fresh + bias, plain, atol=1e-5) and (fresh - plain).abs().max() > 1
    assert torch.allclose(merged, plain, atol=1e-5)
PY
! grep -qi "bias" said || { cat said; exit 1; }
