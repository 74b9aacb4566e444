"""Methods, steps and the mathematics they are made of: tensors in, tensors out, no files and no paths."""
