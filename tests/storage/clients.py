"""A client that has a volume mounted."""

import collections.abc
import contextlib
import os
import pathlib
import subprocess
import time

import proxies

from slurm_ddp import juicefs, juicefs_access, mounts
from slurm_ddp.commands import clean_env


@contextlib.contextmanager
def _fusectl() -> collections.abc.Generator[pathlib.Path]:
    """Show the kernel's FUSE connections, by the minor number of the device; few containers have them mounted."""
    folder = pathlib.Path("/sys/fs/fuse/connections")
    subprocess.run(
        ["mount", "-t", "fusectl", "fusectl", str(folder)],
        check=True,
        capture_output=True,
        timeout=30,
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True, timeout=30)


@contextlib.contextmanager
def mounted(
    proxy: proxies.Proxy,
    folder: pathlib.Path,
    *,
    is_read_only: bool = False,
    program: pathlib.Path | None = None,
) -> collections.abc.Generator[pathlib.Path]:
    """Mount the proxy's offer as a client does: endpoint, secret's content, and the shared library.

    The client runs the proxy's juicefs, or `program`. Cache, log and mountpoint are in `folder`.
    """
    volume, secret = proxy.offer
    access = juicefs_access.of(volume, secret, directory=folder / "client")
    access.ensure_files()
    mountpoint = folder / "mnt"
    mountpoint.mkdir(parents=True)
    about = {
        "no-usage-report": True,
        "cache-dir": str(folder / "cache"),
        "cache-size": "64",
        "subdir": "/",
    }
    flags = juicefs.flags(about)
    if is_read_only:
        flags.append("--read-only")
    argv = [
        str(program or proxy.program),
        "--no-agent",
        "mount",
        *flags,
        access.url,
        str(mountpoint),
    ]
    with (folder / "mount.log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env=clean_env(access.environment))
        try:
            end = time.monotonic() + 30
            while not mounts.at(str(mountpoint)):
                assert process.poll() is None and time.monotonic() < end, (
                    folder / "mount.log"
                ).read_text()
                time.sleep(0.05)
            yield mountpoint
        finally:
            minor = os.minor(mountpoint.stat().st_dev) if mounts.at(str(mountpoint)) else None
            subprocess.run(
                ["umount", str(mountpoint)], check=False, capture_output=True, timeout=30
            )
            subprocess.run(
                ["umount", "-l", str(mountpoint)], check=False, capture_output=True, timeout=30
            )
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                # A container started in the meantime has a copy of the mount. Abort the connection,
                # as with the last copy: at a SIGTERM JuiceFS would leave its session behind.
                if minor is None:
                    process.terminate()
                else:
                    with _fusectl() as connections:
                        (connections / str(minor) / "abort").write_text("1")
                process.wait(60)
