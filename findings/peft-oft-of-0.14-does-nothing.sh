#!/usr/bin/env bash
# peft 0.21.2: an OFT adapter that peft 0.14.0 saved loads as an untrained one.
#
# Expected: an error, as there is one for OFT adapters of 0.13 and before.
# Seen: the model gives exactly what its base gives. The check asks for oft_block_size, which 0.14 has
#   too; its tensors are called oft_r, and those of later versions oft_R.weight. A warning says that
#   keys are missing.
# So: merge such adapters with 0.14.0, and let warnings of missing adapter keys be errors.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for name in old new; do python3 -m venv $name; done
old/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==4.46.3 peft==0.14.0
new/bin/pip install --quiet torch==2.13.0 transformers==5.23.0 peft==0.21.2
cat > apart.py <<'PY'
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
base = Net()
state = {name: own.clone() for name, own in base.state_dict().items()}
seen = torch.randn(3, 12)
before = base(seen).detach()
if sys.argv[1] == "save":
    trained = peft.get_peft_model(base, peft.OFTConfig(r=3, target_modules=["first"]))
    for parameter in trained.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) * parameter.requires_grad
    trained.save_pretrained("adapter")
again = Net()
again.load_state_dict(state)
model = peft.PeftModel.from_pretrained(again, "adapter").eval()
print(float((model(seen) - before).detach().abs().max()))
PY
before=$(old/bin/python apart.py save)
after=$(new/bin/python apart.py load)
echo "the adapter changes outputs by $before in 0.14.0, by $after in 0.21.2"
python3 -c "assert $before > 0.01 and $after == 0, ($before, $after)"
