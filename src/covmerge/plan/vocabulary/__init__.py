"""The output's vocabulary, where its sources have different ones.

tokens    a model's tokenizer, as transformers loads it
rows      which row of which source a token of the output has, decided
tables    the tensors whose rows are tokens
retokenized   a source as it looks under the output's vocabulary
chat, formats   chat templates: a model's, that of most models, or a format's by its name
files     the output's tokenizer files
decide    all of that for a recipe
"""
