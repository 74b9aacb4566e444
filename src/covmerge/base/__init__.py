"""Errors, types, text, sizes and memory for every floor. Nothing here imports from the floors above."""
