#!/usr/bin/env bash
# transformers 5.23.0: a Llama with a rope_theta of its own, saved by it, is another model in 4.57.1.
#
# Expected: the same logits, or an error: the weights have the same names in both.
# Seen: config.json has rope_parameters and no rope_theta. 4.57.1 does not know the former and takes its
#   default of 10000 for the latter, with no warning. Llama 3 (500000) and Qwen (1000000) compute something else.
# So: write "rope_theta" (and "rope_scaling", where there is one) into config.json for anything that is older than 5.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in old new; do python3 -m venv $name; done
old/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==4.57.1
new/bin/pip install --quiet torch==2.13.0 transformers==5.23.0
cat > read.py <<'PY'
import sys
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
transformers.logging.set_verbosity_error()
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
if sys.argv[1] == "save":
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope)).save_pretrained("model")
model = AutoModelForCausalLM.from_pretrained(sys.argv[2]).eval()
print(float(model.model.rotary_emb.inv_freq[-1]))
PY
after=$(new/bin/python read.py save model 2> /dev/null)
before=$(old/bin/python read.py load model 2> /dev/null)
sed -i 's/"rope_parameters"/"rope_theta": 1000000.0, "rope_parameters"/' model/config.json
mended=$(old/bin/python read.py load model 2> /dev/null)
echo "the slowest angle: $after in 5.23.0, $before in 4.57.1, $mended there with rope_theta in config.json"
python3 -c "assert abs($before / $after - 10 ** 1.5) < 0.1 and abs($mended / $after - 1) < 1e-5"
