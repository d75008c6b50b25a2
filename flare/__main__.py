"""`python -m flare`: the same as the command `flare`."""

from .cli import main

main()
