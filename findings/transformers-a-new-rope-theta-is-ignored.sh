#!/usr/bin/env bash
# transformers 5.23.0: a rope_theta that is set on a loaded config, or given to AutoConfig.from_pretrained, does nothing.
#
# Expected: the model turns positions by the new angles, as in 4.57.1, or an error: a context is lengthened that way.
# Seen: the angles come from rope_parameters, which keeps the old number; the new one is an attribute that nothing reads. It is
#   saved, too: config.json then has both numbers, and 4.57.1 reads the one that 5 ignores: the same folder is two models.
# So: set config.rope_parameters["rope_theta"], and look at model.model.rotary_emb.inv_freq.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")/tiny_llama.py" "$work"
cd "$work"
for version in 5.23.0 4.57.1; do
  python3 -m venv "venv-$version"
  "venv-$version/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 "transformers==$version"
done
cat > angles.py <<'PY'
import sys
import warnings

from transformers import AutoConfig, AutoModelForCausalLM

warnings.simplefilter("error", UserWarning)
def angle(config):
    """The rope_theta that a model of the config computes with, from its second angle."""
    model = AutoModelForCausalLM.from_config(config)
    return round(float(model.model.rotary_emb.inv_freq[1]) ** -4)
given = AutoConfig.from_pretrained("base", rope_theta=1e6)
later = AutoConfig.from_pretrained("base")
later.rope_theta = 1e6
found = [angle(given), angle(later)]
if sys.argv[1:] == ["save"]:
    later.save_pretrained("longer")
print(*found, angle(AutoConfig.from_pretrained("longer")))
PY
export HF_HUB_OFFLINE=1
venv-5.23.0/bin/python -c 'from tiny_llama import base; base.save_pretrained("base")'
five=$(venv-5.23.0/bin/python angles.py save)
four=$(venv-4.57.1/bin/python angles.py)
echo "rope_theta given, set, and stored, in 5.23.0: $five; in 4.57.1: $four"
[ "$five" = "10000 10000 10000" ]
[ "$four" = "1000000 1000000 1000000" ]
