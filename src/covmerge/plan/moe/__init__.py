"""Building a mixture of experts from dense models."""
