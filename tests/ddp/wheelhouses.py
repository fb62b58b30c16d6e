"""Folders and archives of wheels."""

import io
import pathlib
import tarfile
import typing
import zipfile

WHEELS = {"numpy-2.0-py3-none-any.whl": b"numpy", "torch-2.13.0+cpu-py3-none-any.whl": b"torch" * 1000}


def make(folder: pathlib.Path, form: str, wheels: dict[str, bytes] = WHEELS) -> str:
    """Return the path of a wheelhouse of this form."""
    path = folder / f"wheels{form}"
    if not form:
        path.mkdir()
        for name, data in wheels.items():
            (path / name).write_bytes(data)
    elif form == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("wheels/README", "no wheel")
            for name, data in wheels.items():
                archive.writestr(f"wheels/{name}", data)
    else:
        with tarfile.open(path, "w") as archive:  # the double of zstd compresses nothing
            for name, data in {"README": b"no wheel", **wheels}.items():
                add(archive, f"./wheels/{name}", data)
    return str(path)


def add(archive: tarfile.TarFile, name: str, data: bytes = b"x", **more: typing.Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in more.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(data))
