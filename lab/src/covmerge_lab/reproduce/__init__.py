"""The papers' tables, done again: published values as data, checkpoints, merges, scores.

published   what a table, a setting, a row and a column are
ace, actmat the tables; predicted: a row of covmerge's default in each; tables: all of them by name
sources     where the checkpoints are; fetch: the hub, whole or not at all
glue, clip, t5, lm   scoring by family; bench: what they share
run         one setting: fetch, merge, score; report: paper value beside own value
stand_ins   tiny models and data in the same formats
"""

from covmerge_lab.reproduce.tables import TABLES, choose_settings, find_table

__all__ = ["TABLES", "choose_settings", "find_table"]
