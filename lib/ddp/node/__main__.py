"""`python3 -I -S -B PROGRAM PART SPEC ...`: run a part of a job.

PROGRAM, a zip, has this file and the package.
"""

import importlib
import os
import sys

MODULES = {
    "job": "supervisor",
    "prepare": "dataset_preparation",
    "unpack": "unpacking",
    "image": "container",
    "mirror": "mirror",
    "node": "task",
    "activate": "activation",
    "shell": "shell",
    "notebook": "notebook",
}


def main() -> int:
    """Run the part that the command line names.

    Only its own modules are imported: imports delay every job.
    """
    part, spec_path, *words = sys.argv[1:]
    module = importlib.import_module(f"ddp.node.{MODULES[part]}")
    # Import from this host's disk alone from now on: the program's filesystem may fail
    del sys.path[0]
    if part != "node":
        return module.main(spec_path)
    return module.main(spec_path, words)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may hang on a dead filesystem
