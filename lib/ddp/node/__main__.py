"""`python3 -I -S -B FOLDER PART SPEC …`: a part of a job, where FOLDER holds this file and the package beside it."""

import os
import sys


def main() -> int:
    """Run the part that the command line names; it imports only its own modules: imports delay every job."""
    part, name, *words = sys.argv[1:]
    folder = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(folder, name)
    if part == "job":
        from ddp.node import supervisor

        _drop_from_path(folder)
        return supervisor.main(path)
    if part == "prepare":
        from ddp.node import prepare

        _drop_from_path(folder)
        return prepare.main(path)
    from ddp.node import node

    _drop_from_path(folder)
    return node.main_rank(path, words) if part == "rank" else node.main(path, words)


def _drop_from_path(folder: str) -> None:
    """Import from this host's disk alone from now on: the program's own filesystem may fail."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may hang on a dead filesystem
