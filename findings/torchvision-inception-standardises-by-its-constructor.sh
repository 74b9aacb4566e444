#!/usr/bin/env bash
# torchvision 0.28.0: a fine-tuned Inception v3 or GoogLeNet that is loaded into inception_v3(weights=None) reads images otherwise.
#
# Expected: weights and architecture are the model: the state_dict is strict, and all its keys are there.
# Seen: a model that is made with weights= has transform_input=True and turns images that were standardised as ImageNet's into
#   another range inside forward; one that is made without, and then gets the same state_dict, does not. Whoever fine-tunes
#   from pretrained weights and loads the result by load_state_dict has a model whose images have another contrast and tint.
# So: pass transform_input=True to inception_v3 and googlenet wherever weights come from a pretrained model. A merge of one that was
#   trained from pretrained weights and one from scratch is of two ranges of pixels.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 torchvision==0.28.0
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import torch
from torchvision.models import GoogLeNet_Weights, Inception_V3_Weights, googlenet, inception_v3

torch.manual_seed(0)
seen, turned = {}, {}
for make, weights, size in ((inception_v3, Inception_V3_Weights.DEFAULT, 299), (googlenet, GoogLeNet_Weights.DEFAULT, 224)):
    scratch = make(weights=None, aux_logits=True, init_weights=True).eval()
    stored = scratch.state_dict()
    # the download, replaced by weights of the same names and shapes
    type(weights).get_state_dict = lambda self, *given, stored=stored, **named: stored
    tuned = make(weights=weights)  # and here would be a fine-tune
    torch.save(tuned.state_dict(), "tuned.pt")
    tuned.eval()
    images = torch.randn(4, 3, size, size)
    outputs = {}
    for name, settings in (("plain", {}), ("transform_input", {"transform_input": True})):
        again = make(weights=None, aux_logits=hasattr(tuned, "AuxLogits"), init_weights=False, **settings)
        again.load_state_dict(torch.load("tuned.pt"), strict=True)
        with torch.no_grad():
            outputs[name] = again.eval()(images)
    with torch.no_grad():
        right = tuned(images)
    turned[make.__name__] = [tuned.transform_input, make(weights=None, init_weights=False).transform_input]
    seen[make.__name__] = {name: round(float((own - right).norm() / right.norm()), 3) for name, own in outputs.items()}
print("outputs of the same weights are off by:", seen, "transform_input with weights= and without:", turned)
assert seen["inception_v3"]["transform_input"] == 0 and seen["inception_v3"]["plain"] > 0.5, seen
assert turned == {"inception_v3": [True, False], "googlenet": [True, False]}, turned
PY
! grep -qi "transform_input" said || { cat said; exit 1; }
