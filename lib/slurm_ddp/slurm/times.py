"""Times as Slurm writes them."""

import re

NO_LIMIT = ("UNLIMITED", "INFINITE")  # slurm.conf(5), MaxTime


def parse_time(text: str) -> int | None:
    """Return the seconds of a time in Slurm's notation, None for no limit (sbatch(1), --time)."""
    if not re.fullmatch(r"\d{1,6}(-\d{1,6}){0,1}(:\d{1,6}){0,2}", text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:  # MM[:SS]; the others begin with hours
        parts.insert(0, 0)
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def format_time(seconds: int) -> str:
    """Return the seconds in Slurm's notation D-HH:MM:SS."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    return (
        f"{day}-{hour:02}:{minute:02}:{second:02}" if day else f"{hour:02}:{minute:02}:{second:02}"
    )
