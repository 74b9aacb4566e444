#!/usr/bin/env bash
# peft 0.21.2: a LoKr adapter that peft 0.13.2 trained and saved is scaled by alpha / r, and was not before.
#
# Expected: the update that it was trained as, or an error.
# Seen: 0.13.2 left alpha out of LoKr; from 0.14 on it counts. With r = 2 and alpha = 8 the same file is
#   an update four times as long, with no warning about it. Its adapter_config.json has no
#   rank_dropout_scale, which 0.14 brought.
# So: set alpha to r (and alpha_pattern to {}) in adapter_config.json where that field is missing.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in old new; do python3 -m venv $name; done
old/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==4.46.3 peft==0.13.2
new/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cat > norm.py <<'PY'
import sys
import torch
import peft
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(12, 8)
    def forward(self, seen):
        return self.first(seen)
torch.manual_seed(0)
if sys.argv[1] == "save":
    config = peft.LoKrConfig(r=2, alpha=8, target_modules=["first"], init_weights=False)
    peft.get_peft_model(Net(), config).save_pretrained("adapter")
model = peft.PeftModel.from_pretrained(Net(), "adapter")
print(float(model.base_model.model.first.get_delta_weight("default").norm()))
PY
before=$(old/bin/python norm.py save)
after=$(new/bin/python norm.py load)
echo "the norm of the update: $before in 0.13.2, $after in 0.21.2"
python3 -c "assert abs($after / $before - 4) < 1e-4, ($before, $after)"
