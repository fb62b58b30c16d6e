"""The files that the charm writes, as templates.

Standard library only: the watching service uses them.
"""

import pathlib

_FOLDER = pathlib.Path(__file__).with_name("templates")


def fill(name: str, **values: object) -> str:
    """Return the text of a template with these values."""
    return (_FOLDER / name).read_text().format(**values)
