"""`python -m ddp`: the program where it is not installed."""

from ddp import cli

if __name__ == "__main__":
    cli.main()
