"""What trainer_child.py and its operations use of `ddp.node.explain`, whose text the child has, too."""

from ddp.node.explain import (
    MAX_JSON_BYTES,
    MAX_TAIL_BYTES,
    TELLING,
    Json,
    absentees,
    attempt_of,
    blame,
    first_failure,
    opened,
    rank_logs,
    read_object,
    tail,
)

__all__ = [
    "MAX_JSON_BYTES",
    "MAX_TAIL_BYTES",
    "TELLING",
    "Json",
    "absentees",
    "attempt_of",
    "blame",
    "first_failure",
    "opened",
    "rank_logs",
    "read_object",
    "tail",
]
