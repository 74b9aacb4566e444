"""What an output needs besides its weights: config, tokenizer, index, heads, manifest, model card."""
