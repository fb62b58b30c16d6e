"""Exit codes of the parts of a job, as in sysexits(3), and the error with one line for the log."""

FATAL = 78  # EX_CONFIG: the node, or the job's options, cannot work
COMES_BACK = 75  # EX_TEMPFAIL: the job has saved


class FatalError(Exception):
    """The job cannot run, or not on this node; `str()` is one line with the remedy."""


def exit_code(returncode: int) -> int:
    """Convert a return code as a shell does: 128 plus the number of the signal."""
    return returncode if returncode >= 0 else 128 - returncode
