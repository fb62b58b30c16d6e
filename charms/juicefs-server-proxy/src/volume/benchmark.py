"""Mount the volume on this machine for a moment, and measure it."""

import collections.abc
import contextlib
import os
import pathlib
import re
import secrets
import signal
import subprocess
import tempfile
import time

import pydantic

from slurm_ddp import apt, juicefs, mounts
from slurm_ddp.charm import Action, ActionError, Log, Results
from slurm_ddp.run import clean_env, last_line, run, scrub
from volume.maintenance import Long, private, with_progress
from volume.target import Target, Unit

_DROP_CACHES = pathlib.Path("/proc/sys/vm/drop_caches")
_REMOVE_S = 120.0
_MOUNT_S = 60.0


class _Parameters(Long, frozen=True):
    big_file_size: int = pydantic.Field(default=256, ge=1, le=65536)  # MiB
    small_files: int = pydantic.Field(default=100, ge=1, le=100000)


def _measure(unit: Unit, wanted: _Parameters, log: Log) -> Results:
    """Measure writing and reading, without a cache."""
    target, big_mib, small_files = unit.verify()[0], wanted.big_file_size, wanted.small_files
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise ActionError("/dev/fuse does not open here: run the action benchmark of shared-filesystem-client")
    apt.ensure_packages(["fuse3"])
    env = {"PATH": ""}  # it finds no `rm` then, which would put what it wrote into the trash, and only warns
    if not os.access(_DROP_CACHES, os.W_OK):  # a container
        env["SKIP_DROP_CACHES"] = "true"
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=private(target.directory)) as scratch:
        mountpoint, cache = pathlib.Path(scratch) / "mnt", pathlib.Path(scratch) / "cache"
        mountpoint.mkdir()
        # A cache of next to nothing: it is the engine and the store that are measured
        options = {"no-usage-report": True, "no-syslog": True, "cache-dir": str(cache), "cache-size": "1"}
        with _mounted(target, juicefs.flags(options | {"backup-meta": "0"}), mountpoint):
            log(f"mounted; writing and reading {big_mib} MiB and {small_files} small files")
            sizes = [f"--big-file-size={big_mib}", f"--small-file-count={small_files}", "--small-file-size=0.1"]
            folder = str(mountpoint / f".benchmark-{secrets.token_hex(8)}")
            run("/usr/bin/mkdir", folder, timeout=_REMOVE_S)
            try:
                argv = ("bench", *sizes, folder)
                done = with_progress("bench", log, lambda: target.invoke(*argv, env=env, timeout=wanted.timeout))
            finally:
                for command in juicefs.removal(target.program, folder):
                    run(*command, timeout=_REMOVE_S)
        return read(done.stdout)


def read(output: str) -> Results:
    """Read the figures in the table that `juicefs bench` prints."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    figure = r"\s*([0-9.]+ [^|]+?)\s*\|"
    rows = re.findall(rf"^[|\s]*([A-Z][A-Za-z ]+?)\s*\|{figure}{figure}", plain, re.MULTILINE)
    if not rows:
        raise ActionError("juicefs bench returned unexpected output")
    return {name.lower().replace(" ", "-"): f"{value}, {cost}" for name, value, cost in rows}


@contextlib.contextmanager
def _mounted(target: Target, flags: list[str], mountpoint: pathlib.Path) -> collections.abc.Generator[None]:
    options = ("mount", *flags, "-o", "nosuid,nodev")
    argv = [str(target.program), "--no-agent", *options, target.access.url, str(mountpoint)]
    environment = clean_env(target.access.environment)
    with (mountpoint.parent / "log").open("w+") as output:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            end = time.monotonic() + _MOUNT_S
            while not mounts.at(str(mountpoint)):
                if process.poll() is not None or time.monotonic() > end:
                    output.seek(0)
                    text = scrub(output.read(), target.access.secrets)
                    reason = juicefs.reason(text) or last_line(text) or f"not mounted within {_MOUNT_S:.0f} s"
                    raise ActionError(f"mount: {reason}")
                time.sleep(0.1)
            yield
        finally:
            subprocess.run(["/bin/umount", "-l", str(mountpoint)], check=False, capture_output=True, timeout=30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(_MOUNT_S)


ACTIONS: dict[str, Action[Unit]] = {"benchmark": Action(_Parameters, _measure)}
