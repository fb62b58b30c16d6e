"""`python -m ddptrain`."""

import atexit
import os
import sys

_codes: list[int] = []


@atexit.register  # before every other import registers its own, so that it runs last
def _leave() -> None:
    """End here, not in the interpreter's finalization: threads of torch that it meets end the process by SIGABRT."""
    if _codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_codes[0])


from ddptrain import cli  # noqa: E402 - see above

if __name__ == "__main__":
    _codes.append(cli.main())
    sys.exit(_codes[0])
