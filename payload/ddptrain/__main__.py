"""`python -m ddptrain`."""

import os
import sys

from ddptrain import cli

if __name__ == "__main__":
    code = cli.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # not by the interpreter's finalization, which torch's threads turn into a SIGABRT
