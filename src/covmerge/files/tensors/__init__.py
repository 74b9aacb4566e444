"""What a tensor is, and how it holds matrices `(d_out, d_in)`."""
