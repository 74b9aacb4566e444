"""Stores of files, and how local files are named, opened, written and locked."""
