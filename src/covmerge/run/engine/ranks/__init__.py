"""Several equal processes, on one machine or many, do one merge: by files of a shared folder alone.

rank      which of how many a process is
ledger    what each rank has done, and whether it is still there
claims    whose an item is
reading   the finished output and the sources, a file a piece
session   what they have in common while one of them leads
executor  the executor that does this rank's part, and yields what all have done
"""
