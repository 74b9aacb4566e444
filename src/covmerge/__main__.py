"""`python -m covmerge`: the command line."""

from covmerge.cli import main

main()
