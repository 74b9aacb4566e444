"""Values of a recipe that a score chooses.

trials     Optuna: what is tried next, and the record of what was
result     trials by tasks, the best, the Pareto front, how far a search fits its questions
job        a search from a recipe with marks to the best recipe and its model, several merges in one reading
"""
