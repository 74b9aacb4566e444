"""Measurements against physical limits and peers; results are kept as JSON."""
