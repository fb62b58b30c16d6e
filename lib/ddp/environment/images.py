"""Container images: each is imported once, as an environment whose archive has an OCI bundle."""

import json
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile
import time

from ddp.environment import archives, store
from ddp.host import files
from ddp.node import small_files, spool
from ddp.options import models
from ddp.problem import Command, ParameterError, Problem, Results, Step
from ddp.results.progress import Log, with_progress
from ddp.settings import Settings
from ddp.workspace import folders

TOOLS = ("skopeo", "umoci", "zstd")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}  # from uname(2)'s names to images' ones


def import_image(settings: Settings, params: models.ImportImage, log: Log) -> Results:
    """Copy an image from a registry or a file, unpack it and store it. Raises Problem."""
    workspace = settings.workspace
    name = params.name
    source = params.source
    kept_in = str(workspace.environments)
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        install = Step("install-tools", f"as root: apt-get install {' '.join(missing)}")
        raise Problem(
            f"{missing[0]}, which imports images, is not installed on this host", remedy=install
        )
    workspace.ensure_folders()
    workspace.do(lambda: _check(source))
    if store.own(workspace, name):
        remedy = Command("env remove", arguments=(name,))
        raise ParameterError(
            "name", f"{name} exists; choose another name, or remove it", remedy=remedy
        )
    with tempfile.TemporaryDirectory(
        prefix="image-", dir=spool.own_cache(str(workspace.host_cache))
    ) as build:
        digest = with_progress(log, f"copying {source}", lambda: _unpack(build, source))
        size = sum(path.lstat().st_size for path in pathlib.Path(build, "env").rglob("*"))
        about = {
            "name": name,
            "source": source,
            "digest": digest,
            "python": "",
            "unpacked_bytes": size,
        }
        about["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        given: dict[str, object] = {
            "build": build,
            "folder": kept_in,
            "manifest": store.NOT_INSTALLED.model_dump() | about,
        }

        def keep() -> dict[str, object]:
            return workspace.do(archives.store_environment, timeout_s=3600, **given)

        stored = with_progress(log, f"storing {size >> 20} MiB in {kept_in}", keep)
    return {
        "name": name,
        **store.describe(folders.Manifest.model_validate({**stored, "folder": kept_in})),
    }


def _check(source: str) -> None:
    """Raise ParameterError for an archive that is not a file: skopeo waits for a pipe's end."""
    kind, _, path = source.partition(":")
    if not kind.endswith("-archive"):
        return
    try:
        what = files.special(pathlib.Path(path.partition(":")[0]).stat().st_mode)
    except OSError as e:
        raise ParameterError("source", f"{path} cannot be read: {e.strerror}") from e
    if what:
        raise ParameterError("source", f"{path} is {what}, not a file")


def _unpack(build: str, source: str) -> str:
    """Copy an image to a folder, unpack it to a bundle there; return its digest. Raises Problem."""
    layout = pathlib.Path(build, "layout")
    _call("skopeo", "copy", "--quiet", source, f"oci:{layout}:image")  # which checks the digests
    digest = str(small_files.read_object(layout / "index.json")["manifests"][0]["digest"])
    config = small_files.read_object(layout / "blobs" / digest.replace(":", "/"))["config"][
        "digest"
    ]
    machine = small_files.read_object(layout / "blobs" / config.replace(":", "/"))["architecture"]
    if machine != (mine := _MACHINES.get(platform.machine(), platform.machine())):
        raise ParameterError(
            "source", f"{source} is for {machine}, this cluster is {mine}; choose another image"
        )
    _call("umoci", "unpack", "--rootless", "--image", f"{layout}:image", f"{build}/env")
    _call("chmod", "-R", "u+rwX", f"{build}/env")  # images have files that their owner cannot read
    return digest


def _call(*argv: str) -> None:
    done = subprocess.run(
        argv,
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        found = re.search(r'msg=(".*")', last)
        raise Problem(f"{argv[0]}: {json.loads(found[1]) if found else last}")
