"""The ranks' image: with pyxis, with apptainer, or with the OCI runtime of Slurm's oci.conf.

An imported image is unpacked on each node as an environment is. An OCI runtime starts a bundle, a folder with a
config.json (opencontainers.org, runtime-spec): here one for each job, as its user, in a user namespace of that account.
"""

import json
import os
import re
import subprocess
import typing

from ddp.node import ending, environment, slurm, spec, spool

Json = dict[str, typing.Any]
_BOUND = "/proc /sys /dev /tmp /var/tmp /etc/hosts /etc/resolv.conf /etc/passwd /etc/group".split()
_DRIVER = "/usr/local/nvidia/lib64"  # on LD_LIBRARY_PATH in NVIDIA's images
_LIBRARY = re.compile(r"^\t(lib(?:cuda|nvidia|nvcuvid)\S*) \(libc6,(?:x86-64|AArch64).*\) => (\S+)$", re.MULTILINE)


def launch(job: spec.JobSpec, mounts: list[str], words: list[str], env: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return srun's further options, and the command that it starts on each node. Raises FatalError."""
    import shutil

    assert job.container is not None
    image, imported, names = job.container.image, job.environment, job.container.variables
    mounts = [job.workspace, *([job.cache] if imported else []), *mounts]
    bound = ",".join(f"{path}:{path}" for path in mounts)
    if not imported and "--container-image" in slurm.call("srun", "--help").stdout:  # pyxis
        options = [f"--container-image={image}", f"--container-mounts={bound}"]
        return [*options, f"--container-workdir={job.workdir}", f"--container-env={names}"], words
    if tool := shutil.which("apptainer") or shutil.which("singularity"):
        if imported:
            image = f"{environment.place(imported, imported.layers[0])}/rootfs"
        elif not image.startswith("/") and "://" not in image:
            image = "docker://" + image.replace("#", "/")
        gpus = ["--nv"] if job.gpus_per_node else []
        return [], [tool, "exec", *gpus, "--bind", bound, "--pwd", job.workdir, image, *words]
    if not os.path.exists(f"{os.path.dirname(env.get('SLURM_CONF', '/etc/slurm/'))}/oci.conf"):
        needs = "apptainer on the nodes, or oci.conf" if imported else "pyxis in Slurm, or apptainer on the nodes"
        why = f"container-image needs {needs}, and neither is installed"
        raise ending.FatalError(f"{why}; omit container-image, or install one of them")
    if not imported:
        hint = f"ddp image import docker://{image.replace('#', '/')} NAME"
        raise ending.FatalError(f"the runtime of oci.conf starts imported images; {hint}; then container-image NAME")
    return [f"--container={_bundle(imported, env)}"], words


def main(spec_path: str, _: list[str]) -> int:
    """Unpack the job's image on this node, write the job's bundle, and return the exit code."""
    env = dict(os.environ)
    try:
        _prepare(spec.load(spec.JobSpec, spec_path), env)
    except (ending.FatalError, OSError) as e:
        spool.write(f"[FATAL] {env['SLURMD_NODENAME']}: {e}")
        return ending.FATAL
    return 0


def _prepare(job: spec.JobSpec, env: dict[str, str]) -> None:
    assert job.container is not None
    assert job.environment is not None
    environment.use(job.environment, env["SLURMD_NODENAME"], f"{env['RUN_DIR']}/control")
    home, bundle = environment.place(job.environment, job.environment.layers[0]), _bundle(job.environment, env)
    with open(f"{home}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    kept = {*job.container.variables.split(","), "HOME", "TERM"}  # umoci adds the last two
    pairs = [pair.partition("=") for pair in config["process"]["env"]]
    variables = {name: value for name, _, value in pairs if name not in kept}
    driver = _driver() if job.gpus_per_node else []
    if driver:
        variables["LD_LIBRARY_PATH"] = ":".join(filter(None, (variables.get("LD_LIBRARY_PATH"), _DRIVER)))
    os.makedirs(bundle, exist_ok=True)
    with open(f"{bundle}/config.json", "w", encoding="utf-8") as file:
        json.dump(_config(job, f"{home}/rootfs", variables, [*_mounts(job, env.get("HOME", "")), *driver]), file)


def _bundle(image: spec.Environment, env: dict[str, str]) -> str:
    return f"{environment.place(image, image.layers[0])}/jobs/{env['SLURM_JOB_ID']}"


def _config(job: spec.JobSpec, root: str, variables: dict[str, str], mounts: list[Json]) -> Json:
    """Return a bundle's config.json; Slurm adds the command and the job's variables (slurmstepd, container.c)."""
    uid, gid = os.geteuid(), os.getegid()
    maps = {f"{kind}Mappings": [{"containerID": n, "hostID": n, "size": 1}] for kind, n in (("uid", uid), ("gid", gid))}
    process = {"user": {"uid": uid, "gid": gid}, "args": ["true"], "cwd": job.workdir, "noNewPrivileges": True}
    return {
        "ociVersion": "1.0.0",
        "process": {**process, "env": [f"{name}={value}" for name, value in variables.items()]},
        "root": {"path": root, "readonly": True},
        "mounts": mounts,
        "annotations": {"run.oci.keep_original_groups": "1"},  # to crun: a project's group writes to its folders
        "linux": {"namespaces": [{"type": "user"}, {"type": "mount"}], **maps},
    }


def _mounts(job: spec.JobSpec, home: str) -> list[Json]:
    """List the mounts, outer folders first; the runtime makes their places in the job's own copy of the image."""
    of_fabrics = (path for fabric in job.fabrics for path in fabric.mounts)
    paths = sorted({*_BOUND, job.workspace, job.cache, *of_fabrics, home} - {"", "/"})
    return [_mount(path, path) for path in paths if os.path.exists(path)]


def _mount(source: str, target: str) -> Json:
    return {"destination": target, "type": "bind", "source": source, "options": ["rbind", "rw"]}


def _driver() -> list[Json]:
    """List the mounts of this node's NVIDIA libraries; those of the image would not fit its kernel module."""
    done = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False, timeout=60)
    return [_mount(path, f"{_DRIVER}/{name}") for name, path in dict(_LIBRARY.findall(done.stdout)).items()]
