"""`python3 -I -S -B FOLDER PART SPEC …`: a part of a job, where FOLDER holds this file and the package beside it."""

import os
import sys


def main() -> int:
    """Run the part that the command line names; each imports only what it needs, for it delays every job."""
    part, name, *words = sys.argv[1:]
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    if part == "job":
        from ddp.node import supervisor

        return supervisor.main(path)
    if part == "prepare":
        from ddp.node import prepare

        return prepare.main(path)
    from ddp.node import node

    return node.main_rank(path, words) if part == "rank" else node.main(path, words)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may hang on a dead filesystem
