"""`python -m ddptrain`."""

import gc
import sys

# Importing torch makes some hundred thousand objects that stay. To look through them for garbage again and again takes
# a tenth of the start; cli.end_imports lets the search begin again, without them.
gc.disable()

from ddptrain import cli  # noqa: E402 - see above

if __name__ == "__main__":
    sys.exit(cli.main())
