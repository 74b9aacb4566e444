"""Matrices in, matrices out: methods, steps and what they are made of; no file and no path."""
