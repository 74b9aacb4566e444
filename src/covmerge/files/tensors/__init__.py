"""The roles of tensors in a model, and the matrices `(d_out, d_in)` that they hold."""
