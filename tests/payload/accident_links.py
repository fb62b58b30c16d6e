"""An accident: the filesystem lacks symbolic links, as SMB without its Unix extensions."""

# pyright: basic
import errno
import os
import typing


def refuse(source: object, target: object, *_: object, **__: object) -> typing.NoReturn:
    number = getattr(errno, os.environ.get("LINKS", "EOPNOTSUPP"))
    raise OSError(number, os.strerror(number), str(source), None, str(target))


os.symlink = refuse
