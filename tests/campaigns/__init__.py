"""Campaigns: many inputs drawn at random, each held to one promise; `python -m tests.campaigns.NAME`."""
