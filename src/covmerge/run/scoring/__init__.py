"""How good models are, by a scorer that the caller names.

scorer     what a scorer is; scorers by name
command    a command that is run on each model
lm_eval, sentences, texts   evaluators of other libraries, by name; `files` reads their examples
values     what a scorer returned, checked
intervals  intervals by the paired bootstrap over examples
kept       scores that were taken before, in scores.json
table      methods by tasks, as text, CSV and LaTeX
job        score several models
"""

from covmerge.run.scoring.intervals import Interval, Resamples
from covmerge.run.scoring.job import ScoreJob, ScoreProgress
from covmerge.run.scoring.kept import KEPT_NAME, Candidate, Kept, candidates
from covmerge.run.scoring.scorer import AnyScorer, Scorer, scorer_of
from covmerge.run.scoring.table import CSV_NAME, LATEX_NAME, Scored, ScoreTable, written
from covmerge.run.scoring.values import Score, Scores

__all__ = [
    "CSV_NAME",
    "KEPT_NAME",
    "LATEX_NAME",
    "AnyScorer",
    "Candidate",
    "Interval",
    "Kept",
    "Resamples",
    "Score",
    "ScoreJob",
    "ScoreProgress",
    "ScoreTable",
    "Scored",
    "Scorer",
    "Scores",
    "candidates",
    "scorer_of",
    "written",
]
