#!/usr/bin/env bash
# timm 1.0.31 and open_clip 3.3.0: position embeddings of a ViT for wide images are laid over another grid as if they were a square.
#
# Expected: the weights of a model for 64 x 256 images (4 x 16 patches) are resampled along both axes for another size, as
#   timm's own set_input_size does with the same weights.
# Seen: the file says only that there are 64 patches, and both take them for 8 x 8: each row of 16 becomes two rows of 8. For a
#   size with as many patches (16 x 4, or 8 x 8) both leave the 64 vectors as they are, in the order of the old rows. No count,
#   shape or message differs.
# So: load at the size of training, then call set_input_size in timm; in open_clip, resample before loading.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 timm==1.0.31 open_clip_torch==3.3.0
venv/bin/python - 2> said <<'PY' || { cat said; exit 1; }
import timm
import torch
from open_clip.model import CLIP, resize_pos_embed
from safetensors.torch import save_file

torch.manual_seed(0)
rows, columns = torch.meshgrid(torch.linspace(-1, 1, 4), torch.linspace(-1, 1, 16), indexing="ij")
width = 32
# a smooth field over the 4 x 16 patches, as trained embeddings are: each channel is a slow wave of its own
turns = 3 * torch.randn(2, width)
field = torch.sin(rows.reshape(-1, 1) * turns[0] + columns.reshape(-1, 1) * turns[1])


def built(size, **settings):
    return timm.create_model("vit_tiny_patch16_224", img_size=size, depth=1, embed_dim=width, num_heads=2, **settings)


def clip(size):
    vision = {"image_size": size, "patch_size": 16, "width": width, "layers": 1, "head_width": 16}
    text = {"context_length": 8, "vocab_size": 16, "width": 32, "heads": 2, "layers": 1}
    return CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)


wide = built((64, 256))
wide.pos_embed.data[0, 1:] = field
save_file(wide.state_dict(), "wide.safetensors")
other = clip((64, 256))
other.visual.positional_embedding.data[1:] = field
seen = {}
for size in ((64, 128), (256, 64)):
    right = built((64, 256), checkpoint_path="wide.safetensors")
    right.set_input_size(size)
    right = right.pos_embed[0, 1:].detach()
    loaded = built(size, pretrained=True, pretrained_cfg_overlay={"file": "wide.safetensors"}).pos_embed[0, 1:].detach()
    weights, model = {name: own.clone() for name, own in other.state_dict().items()}, clip(size)
    resize_pos_embed(weights, model)
    model.load_state_dict(weights)
    theirs = model.visual.positional_embedding[1:].detach()
    for name, found in (("timm", loaded), ("open_clip", theirs)):
        seen[name, size] = round(float((found - right).norm() / right.norm()), 2)
    if size == (256, 64):
        assert torch.equal(loaded, field) and torch.equal(theirs, field)
print("off what set_input_size gives, beside its norm, by tool and new size:", seen)
assert all(off > 0.7 for off in seen.values()), seen
PY
[ ! -s said ] || { cat said; exit 1; }
