"""`python -m elman` is the `elman` command."""

from elman.cli import main

if __name__ == "__main__":
    main()
