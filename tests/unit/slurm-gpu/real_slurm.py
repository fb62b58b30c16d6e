"""Slurm 24.11 for tests: the packages that the sandbox's hosts install, unpacked over the image that they boot from.

Commands run in that tree, in a mount namespace of their own, with this machine's network and /tmp.
"""

import collections.abc
import functools
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))  # for the sandbox's image

from sandbox import image  # noqa: E402

_LEFT_OUT = ("mariadb", "openssh", "nfs-", "redis", "perl", "libperl")  # of the packages that hosts install

SUITE = image.SLURM_SUITE  # of Debian


def unpack(folder: pathlib.Path) -> pathlib.Path:
    """Make the tree's upper layer in `folder`, and return the folder."""
    system = _layers()[-1]
    (folder / "upper").mkdir()
    (folder / "root").mkdir()
    for package in sorted((system / "var/cache/apt/archives").glob("*.deb")):
        if not package.name.startswith(_LEFT_OUT) or package.name.startswith("libmariadb"):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "upper")], check=True, timeout=60)
    for name in ("bin", "sbin", "lib"):  # which are links to /usr in the image
        if (folder / "upper" / name).is_dir():
            shutil.copytree(folder / "upper" / name, folder / "upper/usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(folder / "upper" / name)
    for program in (folder / "upper/usr").glob("s*bin/slurm*-wlm"):  # as update-alternatives does
        program.with_name(program.name.removesuffix("-wlm")).symlink_to(program.name)
    return folder


def inside(
    folder: pathlib.Path, argv: collections.abc.Sequence[str], mounts: collections.abc.Iterable[str] = ()
) -> list[str]:
    """Return the command that runs `argv` in the tree of `unpack`.

    `mounts` are shell commands that run in the tree's namespace before, with $root set to the tree.
    """
    layers = [folder / "upper", *_layers()]
    script = [
        f"root={shlex.quote(str(folder / 'root'))}",
        f"mount -t overlay overlay -o lowerdir={':'.join(str(layer) for layer in layers)} $root",
        *(f"mount --rbind /{name} $root/{name}" for name in ("proc", "sys", "dev", "tmp")),
        *mounts,
        f"exec chroot $root {shlex.join(argv)}",
    ]
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", "\n".join(script)]


@functools.cache
def _layers() -> tuple[pathlib.Path, ...]:
    return image.ensure_image(lambda line: print(line, flush=True)).layers


def lacks() -> str | None:
    """List what this machine lacks, in words that say what to do."""
    if os.geteuid() != 0:
        return "run this as root: it mounts Slurm's tree"
    return None
