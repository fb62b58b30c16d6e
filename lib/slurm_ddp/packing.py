"""Pack a script together with the modules that it imports, for the system's Python to run."""

import functools
import io
import modulefinder
import pathlib
import typing
import zipfile


@functools.cache
def sources(main: pathlib.Path) -> dict[str, bytes]:
    """Return a script, as `__main__.py`, and the modules that it imports, by path.

    Only modules of its charm and of lib count.
    """
    finder = modulefinder.ModuleFinder(
        [str(main.parents[1]), str(pathlib.Path(__file__).parents[1])]
    )
    finder.run_script(str(main))  # which reads it and runs nothing
    found: dict[str, bytes] = {}
    for name, module in sorted(typing.cast("dict[str, typing.Any]", finder.modules).items()):
        if module.__file__:
            path = name.replace(".", "/") + ("/__init__.py" if module.__path__ else ".py")
            found[path] = pathlib.Path(module.__file__).read_bytes()
    return found


def pack(main: pathlib.Path) -> bytes:
    """Pack a script and the modules that it imports into a zip application.

    The same sources make the same bytes.
    """
    packed = io.BytesIO(b"#!/usr/bin/python3 -I\n")
    packed.seek(0, io.SEEK_END)
    with zipfile.ZipFile(packed, "w") as archive:
        for path, source in sources(main).items():
            archive.writestr(zipfile.ZipInfo(path), source)  # with a constant time
    return packed.getvalue()
