"""`python -m dtorch.cli` is the `dtorch` program."""

from dtorch.cli.main import main

main()
