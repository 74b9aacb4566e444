"""Score models with a scorer that the caller names.

scorer     the protocol of a scorer; named scorers, and commands that run on each model
lm_eval    the named scorer that uses lm-eval
files      the named scorers on examples of files
values     scores, checked; intervals by the paired bootstrap over examples
table      scores of methods by task, as text, CSV and LaTeX
job        score several models; reuse the scores of earlier runs from scores.json
"""
