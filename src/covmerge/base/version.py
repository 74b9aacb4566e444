"""The version of covmerge."""

__version__ = "0.1.0"
