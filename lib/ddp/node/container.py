"""The ranks' image: with pyxis, with apptainer, or with the OCI runtime of Slurm's oci.conf.

An imported image is unpacked on each node as an environment is. An OCI runtime starts a bundle, a folder with a
config.json (opencontainers.org, runtime-spec): here one for each job, as its user, in a user namespace of that account.
"""

import json
import os
import re
import subprocess
import typing

from ddp.node import exit_codes, slurm_calls, spec, spool, unpacking

Json = dict[str, typing.Any]
_BOUND = "/proc /sys /dev /tmp /var/tmp /etc/hosts /etc/resolv.conf /etc/passwd /etc/group".split()
_PATH, _DRIVER = "LD_LIBRARY_PATH", "/usr/local/nvidia/lib64"
_LIBRARY = re.compile(
    r"^\t(lib(?:cuda|nvidia|nvcuvid)\S*) \(libc6,(?:x86-64|AArch64).*\) => (\S+)$", re.MULTILINE
)


def launch(
    job: spec.JobSpec, mounts: list[str], words: list[str], env: dict[str, str]
) -> tuple[list[str], list[str]]:
    """Return srun's further options, and the command that it starts on each node. Raises FatalError."""
    import shutil

    assert job.container is not None
    image, imported, names = job.container.image, job.environment, job.container.variables
    mounts = [job.workspace, *([job.cache] if imported else []), *mounts]
    bound = ",".join(f"{path}:{path}" for path in mounts)
    if not imported and "--container-image" in slurm_calls.call("srun", "--help").stdout:  # pyxis
        options = [f"--container-image={image}", f"--container-mounts={bound}"]
        return [*options, f"--container-workdir={job.workdir}", f"--container-env={names}"], words
    if tool := shutil.which("apptainer") or shutil.which("singularity"):
        if imported:
            image = f"{_folders(imported, env)[0]}/rootfs"
        elif not image.startswith("/") and "://" not in image:
            image = "docker://" + image.replace("#", "/")
        gpus = ["--nv"] if job.gpus_per_node else []
        return [], [tool, "exec", *gpus, "--bind", bound, "--pwd", job.workdir, image, *words]
    if imported and os.path.exists(
        f"{os.path.dirname(env.get('SLURM_CONF', '/etc/slurm/'))}/oci.conf"
    ):
        return [f"--container={_folders(imported, env)[1]}"], words
    needs, hint = "apptainer on the nodes, or oci.conf in Slurm", "install one of them"
    if not imported:
        needs = "pyxis in Slurm, or apptainer on the nodes"
        hint += f", or import the image: ddp image import docker://{image.replace('#', '/')} NAME"
    raise exit_codes.FatalError(f"container-image needs {needs}, and neither is installed; {hint}")


def main(spec_path: str) -> int:
    """Unpack the job's image on this node, write the job's bundle, and return the exit code."""
    job, env = spec.load(spec.JobSpec, spec_path), dict(os.environ)
    assert job.container is not None
    assert job.environment is not None
    home, bundle = _folders(job.environment, env)
    try:
        spool.ensure_private(job.cache)  # by this name alone: srun has one for all nodes
        unpacking.use(job.environment, env["SLURMD_NODENAME"], f"{env['RUN_DIR']}/control")
        with open(f"{home}/config.json", encoding="utf-8") as file:
            of_image = json.load(file)["process"]["env"]
        os.makedirs(bundle, exist_ok=True)
        with open(f"{bundle}/config.json", "w", encoding="utf-8") as file:
            json.dump(_config(job, f"{home}/rootfs", of_image, env.get("HOME", "")), file)
    except (exit_codes.FatalError, OSError) as e:
        spool.write(f"[FATAL] {env['SLURMD_NODENAME']}: {e}")
        return exit_codes.FATAL
    return 0


def _folders(image: spec.Environment, env: dict[str, str]) -> tuple[str, str]:
    """Return the folder that the image is unpacked to, and the job's bundle in it."""
    home = unpacking.place(image, image.layers[0])
    return home, f"{home}/jobs/{env['SLURM_JOB_ID']}"


def _config(job: spec.JobSpec, root: str, of_image: list[str], home: str) -> Json:
    """Return a bundle's config.json; Slurm adds the command and the job's variables (slurmstepd, container.c)."""
    assert job.container is not None
    kept = {*job.container.variables.split(","), "HOME", "TERM"}  # umoci adds the last two
    variables = [pair for pair in of_image if pair.partition("=")[0] not in kept]
    paths = {
        *_BOUND,
        job.workspace,
        job.cache,
        home,
        *(path for fabric in job.fabrics for path in fabric.mounts),
    }
    mounts = {
        path: path for path in sorted(paths - {"", "/"}) if os.path.exists(path)
    }  # outer folders first
    if job.gpus_per_node:  # the node's libraries fit its kernel module
        known = subprocess.run(
            ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False, timeout=60
        )
        mounts |= {f"{_DRIVER}/{name}": path for name, path in _LIBRARY.findall(known.stdout)}
        found = (dict(pair.split("=", 1) for pair in of_image) | dict(job.variables)).get(_PATH, "")
        variables.append(
            f"{_PATH}={found}:{_DRIVER}".replace("=:", "=")
        )  # the last of a name counts
    ids = {"uid": os.geteuid(), "gid": os.getegid()}
    maps = {
        f"{name}Mappings": [{"containerID": number, "hostID": number, "size": 1}]
        for name, number in ids.items()
    }
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": ids,
            "args": ["true"],
            "cwd": job.workdir,
            "env": variables,
            "noNewPrivileges": True,
        },
        "root": {"path": root, "readonly": True},
        "mounts": [
            {"destination": at, "type": "bind", "source": path, "options": ["rbind"]}
            for at, path in mounts.items()
        ],
        "annotations": {
            "run.oci.keep_original_groups": "1"
        },  # to crun: a project's group writes to its folders
        "linux": {"namespaces": [{"type": "user"}, {"type": "mount"}], **maps},
    }
