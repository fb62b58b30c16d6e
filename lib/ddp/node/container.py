"""The ranks' image: with pyxis, with apptainer, or with the OCI runtime of Slurm's oci.conf.

An imported image is unpacked on each node as an environment is. An OCI runtime starts a bundle, a
folder with a config.json (opencontainers.org, runtime-spec): here one for each job, as its user, in
a user namespace of that account.
"""

import json
import os
import re
import shutil
import subprocess
import typing

from ddp.node import exit_codes, slurm_calls, spec, spool, unpacking

Json = dict[str, typing.Any]
_BOUND = (
    "/proc /sys /dev /tmp /var/tmp /etc/hosts /etc/resolv.conf /etc/passwd /etc/group"
).split()
_LIBRARIES = "LD_LIBRARY_PATH"
_DRIVER = "/usr/local/nvidia/lib64"
_LIBRARY = re.compile(
    r"^\t(lib(?:cuda|nvidia|nvcuvid)\S*) \(libc6,(?:x86-64|AArch64).*\) => (\S+)$", re.MULTILINE
)


class Launch(typing.NamedTuple):
    """How srun starts a command in an image: its further options, and the whole command."""

    options: list[str]
    command: list[str]


def launch(job: spec.JobSpec, mounts: list[str], words: list[str], env: dict[str, str]) -> Launch:
    """Return how srun starts `words` in the job's image on each node. Raises FatalError."""
    assert job.container is not None
    image = job.container.image
    imported = job.environment
    shown = [job.workspace, *mounts]
    if imported:
        shown.append(job.cache)
    elif _has_pyxis():
        return _with_pyxis(job, job.container, shown, words)

    if tool := shutil.which("apptainer") or shutil.which("singularity"):
        source = f"{_folders(imported, env)[0]}/rootfs" if imported else _source(image)
        return _with_apptainer(tool, job, source, shown, words)
    if imported and _has_runtime(env):
        _check_runtime(job.container.oci_fixed)
        _, bundle = _folders(imported, env)
        return Launch([f"--container={bundle}"], words)
    raise _unsupported(image, is_imported=imported is not None)


def _source(image: str) -> str:
    """Return an image's name as apptainer takes it."""
    if image.startswith("/") or "://" in image:
        return image
    return "docker://" + image.replace("#", "/")


def _has_pyxis() -> bool:
    return "--container-image" in slurm_calls.call("srun", "--help").stdout


def _has_runtime(env: dict[str, str]) -> bool:
    folder = os.path.dirname(env.get("SLURM_CONF", "/etc/slurm/"))
    return os.path.exists(f"{folder}/oci.conf")


def _with_pyxis(
    job: spec.JobSpec, container: spec.Container, mounts: list[str], words: list[str]
) -> Launch:
    options = [
        f"--container-image={container.image}",
        f"--container-mounts={_bind(mounts)}",
        f"--container-workdir={job.workdir}",
        f"--container-env={container.variables}",
    ]
    return Launch(options, words)


def _with_apptainer(
    tool: str, job: spec.JobSpec, image: str, mounts: list[str], words: list[str]
) -> Launch:
    command = [tool, "exec"]
    if job.gpus_per_node:
        command.append("--nv")
    command += ["--bind", _bind(mounts), "--pwd", job.workdir, image, *words]
    return Launch([], command)


def _bind(paths: list[str]) -> str:
    return ",".join(f"{path}:{path}" for path in paths)


def _check_runtime(fixed: tuple[str, ...]) -> None:
    """Raise FatalError if Slurm's OCI runtime lets a user remove any path on this node."""
    version = slurm_calls.call("srun", "--version").stdout.strip().rpartition(" ")[2]
    if slurm_calls.lacks_fix(version, fixed):
        text = f"Slurm {version}'s OCI runtime has CVE-2026-65109, fixed in {', '.join(fixed)}"
        remedy = "install apptainer on the nodes, or upgrade Slurm, or submit with --accept-risk"
        raise exit_codes.FatalError(f"container-image: {text}: {remedy}")


def _unsupported(image: str, *, is_imported: bool) -> exit_codes.FatalError:
    needs = "apptainer on the nodes, or oci.conf in Slurm"
    hint = "install one of them"
    if not is_imported:
        needs = "pyxis in Slurm, or apptainer on the nodes"
        source = f"docker://{image.replace('#', '/')}"
        hint += f", or import the image: ddp image import {source} NAME"
    return exit_codes.FatalError(f"container-image needs {needs}, and neither is installed; {hint}")


def main(spec_path: str) -> int:
    """Unpack the job's image on this node, write the job's bundle, and return the exit code."""
    job = spec.load(spec.JobSpec, spec_path)
    env = dict(os.environ)
    host = env["SLURMD_NODENAME"]
    assert job.container is not None
    assert job.environment is not None
    home, bundle = _folders(job.environment, env)
    try:
        spool.ensure_private(job.cache)  # by this name alone: srun has one for all nodes
        unpacking.use(job.environment, host, f"{env['RUN_DIR']}/control")
        with open(f"{home}/config.json", encoding="utf-8") as file:
            of_image: list[str] = json.load(file)["process"]["env"]
        config = _config(job, job.container, f"{home}/rootfs", of_image, env.get("HOME", ""))
        os.makedirs(bundle, exist_ok=True)
        with open(f"{bundle}/config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
    except (exit_codes.FatalError, OSError) as e:
        spool.write(f"[FATAL] {host}: {e}")
        return exit_codes.FATAL
    return 0


def _folders(image: spec.Environment, env: dict[str, str]) -> tuple[str, str]:
    """Return the folder that the image is unpacked to, and the job's bundle in it."""
    home = unpacking.place(image, image.layers[0])
    return home, f"{home}/jobs/{env['SLURM_JOB_ID']}"


def _config(
    job: spec.JobSpec, container: spec.Container, root: str, of_image: list[str], home: str
) -> Json:
    """Return a bundle's config.json.

    Slurm adds the command and the job's variables (slurmstepd, container.c).
    """
    kept = {*container.variables.split(","), "HOME", "TERM"}  # umoci adds the last two
    variables = [pair for pair in of_image if pair.partition("=")[0] not in kept]
    mounts = _mounts(job, home)
    if job.gpus_per_node:
        mounts.update(_driver_libraries())
        known = dict(pair.split("=", 1) for pair in of_image) | dict(job.variables)
        libraries = [path for path in (known.get(_LIBRARIES), _DRIVER) if path]
        variables.append(f"{_LIBRARIES}={':'.join(libraries)}")  # the last of a name counts

    user = {"uid": os.geteuid(), "gid": os.getegid()}
    process = {
        "user": user,
        "args": ["true"],
        "cwd": job.workdir,
        "env": variables,
        "noNewPrivileges": True,
    }
    namespaces: Json = {"namespaces": [{"type": "user"}, {"type": "mount"}]}
    for name, number in user.items():
        mapping = {"containerID": number, "hostID": number, "size": 1}
        namespaces[f"{name}Mappings"] = [mapping]
    return {
        "ociVersion": "1.0.0",
        "process": process,
        "root": {"path": root, "readonly": True},
        "mounts": [_bind_mount(at, source) for at, source in mounts.items()],
        # To crun: a project's group writes to its folders
        "annotations": {"run.oci.keep_original_groups": "1"},
        "linux": namespaces,
    }


def _mounts(job: spec.JobSpec, home: str) -> dict[str, str]:
    """Return the host's folders and files that the bundle shows, outer folders first."""
    paths = {*_BOUND, job.workspace, job.cache, home}
    for fabric in job.fabrics:
        paths.update(fabric.mounts)
    return {path: path for path in sorted(paths - {"", "/"}) if os.path.exists(path)}


def _driver_libraries() -> dict[str, str]:
    """Return the node's own libraries of the driver, which fit its kernel module."""
    known = subprocess.run(
        ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False, timeout=60
    )
    return {f"{_DRIVER}/{name}": path for name, path in _LIBRARY.findall(known.stdout)}


def _bind_mount(at: str, source: str) -> Json:
    return {"destination": at, "type": "bind", "source": source, "options": ["rbind"]}
