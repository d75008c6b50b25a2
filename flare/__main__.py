"""`python -m flare`: the same as the command `flare`."""

from .cli import main

if __name__ == "__main__":  # processes that are started afresh import this module too
    main()
