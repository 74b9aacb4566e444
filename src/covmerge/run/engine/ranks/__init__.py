"""Several equal processes, on one machine or many, do one merge: by files of a shared folder alone.

rank      which of how many a process is
shares    who does what first
ledger    what each rank has done, and whether it is still there
claims    whose an item is
sharing   pieces of work by name, each done by whoever claims it
hashing   the sources' hashes, a file a piece
reading   the finished output, a file a piece
session   what they have in common while one of them leads
executor  the executor that does this rank's part, and yields what all have done
"""

from covmerge.run.engine.ranks.executor import Ranks
from covmerge.run.engine.ranks.rank import Rank, find_rank
from covmerge.run.engine.ranks.reading import help_reading
from covmerge.run.engine.ranks.session import Gathering, LeaderGoneError, Session

__all__ = ["Gathering", "LeaderGoneError", "Rank", "Ranks", "Session", "find_rank", "help_reading"]
