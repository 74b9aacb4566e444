"""The output's vocabulary, if its sources have different ones.

tokens    a model's tokenizer, as transformers loads it
rows      the source's row for each token of the output, and views of sources with these rows
files     the output's tokenizer files and chat template
decide    all of these for a recipe
"""
