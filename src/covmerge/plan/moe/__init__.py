"""A mixture of experts out of dense ones."""
