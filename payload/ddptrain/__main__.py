"""`python -m ddptrain`."""

import sys

from ddptrain import cli

if __name__ == "__main__":
    sys.exit(cli.main())
