"""`python -m covmerge`: the command line."""

from covmerge.front.cli import main

main()
