"""The output's vocabulary, where its sources have different ones.

tokens    a model's tokenizer, as transformers loads it
rows      which row of which source a token of the output has, and a source as it looks with these rows
files     the output's tokenizer files and chat template
decide    all of that for a recipe
"""
