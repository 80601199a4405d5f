"""`python -m its2clr` is the command line."""

from its2clr.cli import main

main()
