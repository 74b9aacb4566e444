"""How good models are, by a scorer that the caller names.

scorer     what a scorer is; scorers by name, and a command that is run on each model
lm_eval, sentences, texts   evaluators of other libraries, by name; `files` reads their examples
values     what a scorer returned, checked; intervals by the paired bootstrap over examples
table      methods by tasks, as text, CSV and LaTeX
job        score several models; scores that were taken before, in scores.json
"""
