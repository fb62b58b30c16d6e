"""`python -m ddp`: the program without an installation."""

from ddp import cli

if __name__ == "__main__":
    cli.main()
