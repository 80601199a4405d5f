"""`python -m its2clr` is the command line."""

from its2clr.cli import main

if __name__ == "__main__":  # worker processes import this module too
    main()
