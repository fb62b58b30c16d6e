"""The program that a job's script starts: ddp.node as one archive, which Python runs."""

import collections.abc
import functools
import io
import pathlib
import zipfile

import ddp.node

_NODE = pathlib.Path(ddp.node.__file__).parent


@functools.cache
def archive() -> bytes:
    """Return the zip that each run has in its folder; the same release returns the same bytes.

    A job runs no other file, since only its user can write there. Nodes read one file sooner than
    many, above all on a network filesystem.
    """
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, path in _modules():
            about = zipfile.ZipInfo(name)  # without the time of now
            file.writestr(about, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _modules() -> collections.abc.Iterator[tuple[str, pathlib.Path]]:
    """List the archive's files by name: the package, and what starts it."""
    yield "__main__.py", _NODE / "__main__.py"
    yield "ddp/__init__.py", _NODE.parent / "__init__.py"
    for path in sorted(_NODE.rglob("*.py")):
        yield str(path.relative_to(_NODE.parent.parent)), path
