"""Search for the values of a recipe that give the best scores.

trials     the trials: Optuna chooses the next values, and a file records the finished trials
result     scores of trials by task, the best trial, the Pareto front, how far a search overfits
job        the search: from a recipe with marks to the best recipe and its model, several merges per reading
"""
