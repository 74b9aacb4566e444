"""Carry out plans, and judge, compare, score, search and verify models."""
