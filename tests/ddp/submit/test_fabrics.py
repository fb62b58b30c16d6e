"""Fabrics as a node chooses them, and containers as the batch script starts them."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import typing

import pytest
from script_texts import ENDS, MANIFEST, texts

from batch_host import Node
from ddp.environment import archives
from ddp.node import network, spec
from ddp.options import fabrics
from ddp.settings import Settings
from ddp.workspace import folders

FABRIC_DRIVER = """
import json, os, sys
from ddp.node import exit_codes, network, spec
job, nodes = spec.load(spec.JobSpec, sys.argv[1]), int(sys.argv[2])
found = network.choose(job, nodes)
env = dict(os.environ)
try:
    network.use(found, job, env, nodes)
except exit_codes.FatalError as e:
    sys.exit(f"[FATAL] gpu-0: {e}")
print(" ".join(found.name if name == "FABRIC" else env.get(name, "unset") for name in sys.argv[3:]))
"""


def fabric(
    settings: Settings, wanted: str, *show: str, nodes: int = 2, **env: str
) -> tuple[int, list[str]]:
    """Prepare a fabric's variables as a node does; return exit code and output, variables last."""
    given = " ".join(f"{name}={value}" for name, value in env.items())
    path = settings.workspace.runs / "spec.json"
    path.write_text(texts(settings, fabric=wanted, env=given)["program/job.json"])
    run = subprocess.run(
        [sys.executable, "-c", FABRIC_DRIVER, path, str(nodes), *show],
        text=True,
        capture_output=True,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(pathlib.Path(network.__file__).parents[2]),
            **env,
        },
    )
    return run.returncode, (run.stderr + run.stdout).splitlines()


@pytest.mark.parametrize("wanted", fabrics.NAMES)
def test_every_fabric_says_which_it_is_or_what_is_missing(settings: Settings, wanted: str):
    code, printed = fabric(settings, wanted, "FABRIC")
    if code == 1:
        assert printed[0].startswith(f"[FATAL] gpu-0: fabric={wanted} needs /")
        assert "; " in printed[0], "and what to do about it"
    else:
        assert (code, printed) == (0, [wanted])


def test_one_node_needs_no_fabric(settings: Settings):
    assert fabric(settings, "efa", "FI_PROVIDER", nodes=1) == (0, ["unset"])


def test_a_fabrics_variables_are_set_and_the_users_go_before(settings: Settings):
    show = "NCCL_IB_DISABLE"
    assert fabric(settings, "tcp", show) == (0, ["1"])
    assert fabric(settings, "tcp", show, NCCL_IB_DISABLE="0") == (0, ["0"])


def with_paths(monkeypatch: pytest.MonkeyPatch, top: pathlib.Path, name: str) -> spec.Fabric:
    """Let a fabric's paths be below a folder of the test's."""

    def moved(text: str) -> str:
        return f"{top}{text}" if text.startswith("/") else text

    found = next(fabric for fabric in fabrics.FABRICS if fabric.name == name)
    there = dataclasses.replace(
        found,
        found_by=tuple(map(moved, found.found_by)),
        needs=tuple(map(moved, found.needs)),
        profile=moved(found.profile),
        library_path=moved(found.library_path),
        mounts=tuple(map(moved, found.mounts)),
    )
    others = (fabric for fabric in fabrics.FABRICS if fabric.name != name)
    monkeypatch.setattr(fabrics, "FABRICS", (there, *others))
    for path in (*there.found_by, *there.needs):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).touch()
    return there


def test_tcpxo_is_found_sourced_and_tamed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
):
    found = with_paths(monkeypatch, tmp_path, "tcpxo")
    pathlib.Path(found.profile).write_text(
        "export NCCL_PROTO=Simple NCCL_BUFFSIZE=8388608 NCCL_SOCKET_IFNAME=x CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n"
        'echo "lib $NCCL_LIB_DIR"; [ "$UNSET_IN_THE_PROFILE" = x ]\n'
    )
    show = "FABRIC NCCL_PROTO NCCL_BUFFSIZE NCCL_SOCKET_IFNAME NCCL_FASTRAK_CTRL_DEV CUDA_VISIBLE_DEVICES".split()
    lib = f"lib {found.library_path}"
    assert fabric(settings, "auto", *show) == (
        0,
        [lib, "tcpxo Simple 8388608 enp0s12 enp0s12 unset"],
    )
    code, printed = fabric(
        settings,
        "tcpxo",
        *show,
        NCCL_BUFFSIZE="1",
        NCCL_SOCKET_IFNAME="eth9",
        CUDA_VISIBLE_DEVICES="3",
    )
    assert (code, printed) == (0, [lib, "tcpxo Simple 1 eth9 enp0s12 3"]), (
        "the user's, and what Slurm gave the job"
    )


def test_roots_part_of_tcpxo_is_a_prolog_and_an_epilog():
    roots = fabrics.root_scripts("tcpxo")
    assert set(roots) == {"prolog", "epilog"}
    for text in roots.values():
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert not fabrics.root_scripts("efa")


@pytest.mark.parametrize("name", ["overlay", "tailscale"])
def test_an_overlay_has_sockets_over_any_interface(settings: Settings, name: str):
    show = ("FABRIC", "NCCL_IB_DISABLE", "NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS")
    assert fabric(settings, name, *show) == (0, [f"{name} 1 4 2"])
    (found,) = [one for one in fabrics.FABRICS if one.name == name]
    assert not found.interface


CONTAINED: dict[str, typing.Any] = {"container_image": "nvcr.io#nvidia/pytorch:25.01-py3"}


SAVES_ARGV = (
    'if [ "$1" = --help ]; then echo "$HELP"; exit; fi; printf "%s\\0" "$@" > "$NOTES/argv"; '
    + ENDS % "done"
)


def test_a_container_runs_under_pyxis_where_slurm_has_it(settings: Settings, node: Node):
    node.add("srun", SAVES_ARGV)
    files = texts(settings, **CONTAINED, env="NCCL_DEBUG=INFO")
    code, output = node.run(files, HELP="  --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
    assert code == 0, output
    argv = (node.notes / "argv").read_text().split("\0")
    workspace = settings.workspace.path
    assert "--container-image=nvcr.io#nvidia/pytorch:25.01-py3" in argv
    assert f"--container-mounts={workspace}:{workspace}" in argv
    assert f"--container-workdir={node.run_dir}" in argv
    assert "--container-env=PYTHONUNBUFFERED,CUDA_VISIBLE_DEVICES,NCCL_DEBUG" in argv
    assert argv.index("/bin/sh") > argv.index(f"--container-workdir={node.run_dir}")


def test_a_container_runs_under_apptainer_where_there_is_no_pyxis(settings: Settings, node: Node):
    node.add("srun", SAVES_ARGV)
    node.add("apptainer", "exit 99")
    assert node.run(texts(settings, **CONTAINED), HELP="no such option")[0] == 0
    argv = (node.notes / "argv").read_text().split("\0")
    at = argv.index(f"{node.bin}/apptainer")
    workspace = settings.workspace.path
    assert argv[at + 1 : at + 7] == [
        "exec",
        "--nv",
        "--bind",
        f"{workspace}:{workspace}",
        "--pwd",
        str(node.run_dir),
    ]
    assert argv[at + 7 : at + 9] == ["docker://nvcr.io/nvidia/pytorch:25.01-py3", "/bin/sh"]


def test_without_pyxis_and_apptainer_the_job_says_so(settings: Settings, node: Node):
    node.add("srun", SAVES_ARGV)
    code, output = node.run(texts(settings, **CONTAINED), HELP="")
    assert code == 78
    assert (
        "[FATAL] slurmd-0: container-image needs pyxis in Slurm, or apptainer on the nodes"
        in output
    )


def test_an_imported_image_is_unpacked_and_started_by_slurms_runtime(
    settings: Settings, node: Node, tmp_path: pathlib.Path
):
    pathlib.Path(tmp_path, "env/rootfs").mkdir(parents=True)
    of_image = {
        "process": {"env": ["PATH=/opt/bin", "NCCL_DEBUG=WARN", "HOME=/root", "LD_LIBRARY_PATH=/a"]}
    }
    pathlib.Path(tmp_path, "env/config.json").write_text(json.dumps(of_image))
    about = MANIFEST.model_dump() | {"name": "torch", "python": "", "digest": f"sha256:{'0' * 64}"}
    made = archives.store_environment(str(tmp_path), str(settings.workspace.environments), about)
    given: dict[str, typing.Any] = {"container_image": "torch", "env": "NCCL_DEBUG=INFO"}
    files = texts(settings, stored=folders.Manifest.model_validate(made), **given)
    unpacks = 'case "$*" in *".pyz image "*) while [ "$1" != /bin/sh ]; do shift; done; exec "$@" ;; esac; '
    node.add("srun", unpacks + SAVES_ARGV)
    conf = tmp_path / "slurm.conf"
    code, output = node.run(files, SLURM_CONF=str(conf))
    assert (code, "needs apptainer on the nodes, or oci.conf in Slurm" in output) == (78, True)
    conf.with_name("oci.conf").touch()
    code, output = node.run(files, SLURM_CONF=str(conf))
    assert code == 0, output
    bundle = node.cache / made["hash"] / "jobs/12"
    assert f"--container={bundle}" in (node.notes / "argv").read_text().split("\0")
    config = json.loads((bundle / "config.json").read_text())
    assert config["root"] == {"path": f"{node.cache}/{made['hash']}/rootfs", "readonly": True}
    assert config["process"]["cwd"] == str(node.run_dir)
    driver = "LD_LIBRARY_PATH=/a:/usr/local/nvidia/lib64"
    assert config["process"]["env"] == ["PATH=/opt/bin", "LD_LIBRARY_PATH=/a", driver]
    assert {str(settings.workspace.path), str(node.cache), "/dev"} <= {
        mount["source"] for mount in config["mounts"]
    }
