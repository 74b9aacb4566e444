"""The files of an output beside its weights: config, tokenizer, index, heads, manifest, model card."""
