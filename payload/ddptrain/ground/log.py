r"""The lines of a run's log that people look for: `INFO:ddptrain:[TRAIN] step=10 loss=2.31`.

The Kubernetes guide's trainer prints the same form, so the same
`egrep "\[DDP\]|\[TRAIN\]|\[EPOCH\]|\[DONE\]"` finds them. A line stays under 1 KiB: `srun --label`
cuts longer ones into pieces.
"""

import json
import logging
import sys
import typing

LIMIT_BYTES = 1000
_SPECIAL = frozenset(' "\n\t=')  # in a value that needs quotes
_log = logging.getLogger("ddptrain")
_handler = logging.StreamHandler(sys.stdout)
_handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))


def setup(*, rank: int) -> None:
    """Send marker lines to stdout; ranks other than 0 print only lines for every rank."""
    if not _log.handlers:
        _log.addHandler(_handler)
        _log.propagate = False
    _log.setLevel(logging.INFO if rank == 0 else logging.ERROR)


def emit(marker: str, text: str = "", /, **fields: typing.Any) -> None:
    """Print `[MARKER] text key=value ...` as one line, rank 0 only."""
    _write(logging.INFO, marker, text, fields)


def every_rank(marker: str, text: str = "", /, **fields: typing.Any) -> None:
    """Print the line on any rank; the level is still INFO."""
    before = _log.level
    _log.setLevel(logging.INFO)
    emit(marker, text, **fields)
    _log.setLevel(before)


def warn(marker: str, text: str = "", /, **fields: typing.Any) -> None:
    """Print a warning, rank 0 only."""
    if _log.level <= logging.INFO:
        _write(logging.WARNING, marker, text, fields)


def fatal(text: str) -> None:
    """Print the one line that says why the run ends, on any rank."""
    _write(logging.ERROR, "FATAL", text, {})


def _write(level: int, marker: str, text: str, fields: dict[str, typing.Any]) -> None:
    parts = [f"[{marker}]", text]
    for key, value in fields.items():
        if value is not None:
            parts.append(f"{key}={_value(value)}")
    line = " ".join(" ".join(parts).split())
    if len(line.encode()) > LIMIT_BYTES:
        line = line.encode()[: LIMIT_BYTES - 3].decode(errors="ignore") + "..."
    _handler.stream = sys.stdout  # of the moment: it may be redirected
    _log.log(level, line)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        value = ",".join(_value(item) for item in typing.cast(list[object], value))
    text = str(value)
    if not text or _SPECIAL.intersection(text):
        return json.dumps(text, ensure_ascii=False)
    return text
