"""A mount of the volume on this machine, as a client would make it, to see that clients can."""

import contextlib
import pathlib
import subprocess
import time

from slurm_ddp import juicefs, mounts
from slurm_ddp.commands import clean_env, scrub
from volume.target import Target

RUN_DIR = pathlib.Path("/run/slurm-ddp")
FUSE = pathlib.Path("/dev/fuse")
_FSTYPE = "fuse.juicefs"
_START_S = 60.0
_PROBE_S = 30.0
_END_S = 20.0
_FLAGS = {
    "no-usage-report": True,
    "no-syslog": True,
    "no-bgjob": True,
    "backup-meta": "0",
    "cache-dir": "memory",
    "cache-size": "64",
}


def check(volume: Target) -> None:
    """Mount the volume, write and read a file through it, and unmount it; clean up earlier trials.

    Without /dev/fuse, juicefs reads the volume without a mount. Raises `JuicefsError`.
    """
    if not FUSE.exists():
        juicefs.ensure_sticky(volume.program, volume.access)
        return
    folder = RUN_DIR / f"trial-{volume.app}"
    mountpoint, log = folder / "volume", folder / "log"
    source = f"JuiceFS:{volume.volume.name}"
    try:
        mounts.clear(mountpoint, fstype=_FSTYPE, source=source)
        mountpoint.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        found = _try(volume, mountpoint, log, source)
        if not found:
            text = scrub(log.read_text(errors="replace"), volume.access.secrets)
            raise juicefs.JuicefsError(
                f"no client can mount it: {juicefs.reason(text) or found.detail}"
            )
    except mounts.MountError as e:
        raise juicefs.JuicefsError(str(e)) from e
    finally:
        log.unlink(missing_ok=True)
        for empty in (mountpoint, folder):
            with contextlib.suppress(OSError):  # nothing below a mount is ever removed
                empty.rmdir()


def _try(volume: Target, mountpoint: pathlib.Path, log: pathlib.Path, source: str) -> mounts.Result:
    command = [
        volume.program,
        "--no-agent",
        "mount",
        *juicefs.flags(_FLAGS),
        volume.access.url,
        mountpoint,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=clean_env(volume.access.environment),
            start_new_session=True,
        )
    try:
        found = _await(process, mountpoint, source)
        if found:
            found = mounts.probe(
                mountpoint,
                fstype=_FSTYPE,
                source=source,
                writable=True,
                sticky=True,
                deadline=_PROBE_S,
            )
        return found
    finally:
        mounts.unmount(mountpoint, fstype=_FSTYPE, source=source, patience=_END_S)
        _end(process)


def _await(
    process: "subprocess.Popen[bytes]", mountpoint: pathlib.Path, source: str
) -> mounts.Result:
    end = time.monotonic() + _START_S
    while True:
        found = mounts.probe(mountpoint, fstype=_FSTYPE, source=source)
        if found or process.poll() is not None or time.monotonic() >= end:
            return found
        time.sleep(0.2)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the client, which ends once nothing is mounted any more."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
