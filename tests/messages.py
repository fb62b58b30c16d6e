"""How long a status may be, and how long the tests' short names are in a cluster."""

import re

# What `juju status` shows of a message: cmd/juju/status/output_tabular.go, maxMessageLength
SHOWN = 120
# What tests write short, and how long it is in a cluster
_REALISTIC = (
    (r"/tmp/pytest-of-[^ :;,)']*/shared", "/srv/team-data"),
    (r"/tmp/pytest-of-[^ :;,)']*", "/var/lib/juju/storage/volume-0"),
    (r"\b\d{1,3}(\.\d{1,3}){3}\b", "192.168.100.100"),
    (r"\bh:6379\b", "db-0.example.com:6379"),
    (r"\b(slurmd|node)-\d\b", "slurmd-12"),
    (r"\b([a-z][a-z-]*)/\d\b", r"\1/12"),
    (r"\bold-uuid\b", "11111111-2222-3333-4444-555555555555"),
)


def fitted(text: str) -> str:
    """Cut a text to the length that a charm shows."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def at_length(message: str) -> str:
    """Write a message with names, paths and addresses as long as they are in a cluster."""
    for pattern, example in _REALISTIC:
        message = re.sub(pattern, example, message)
    return message
