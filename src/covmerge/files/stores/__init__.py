"""Where bytes lie: stores of files, and how files of this machine are named, opened, written and locked."""
