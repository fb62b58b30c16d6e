"""The integration lane's own code, run for Juju 3.6 and for 4 against a stand-in of juju and its cluster."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import juju_standin as standin
import pytest

HERE = pathlib.Path(__file__).resolve().parent
LANE_FILES = standin.ROOT / "tests" / "integration"
LANE = [
    sys.executable,
    "-m",
    "pytest",
    "--config-file",
    str(LANE_FILES / "pytest.ini"),
    "--rootdir",
    str(standin.ROOT),
]


class Place:
    """A fake juju first in PATH, and its calls."""

    def __init__(self, version: str, cloud: str = "aws") -> None:
        self.home = standin.HOME
        shutil.rmtree(self.home, ignore_errors=True)
        for folder in ("bin", "dist"):
            (self.home / folder).mkdir(parents=True)
        for name in (
            "ddp-trainer",
            "juicefs-server-proxy",
            "shared-filesystem-client",
            "slurm-gpu",
        ):
            (
                self.home / "dist" / f"{name}.charm"
            ).touch()  # the lane looks for them; their content does not matter
        (self.home / "state.json").write_text(
            json.dumps({"version": version, "cloud": cloud, "models": {}})
        )
        for name in ("juju", *standin.HOST_COMMANDS):
            target = self.home / "bin" / name
            target.write_text(f'#!/bin/sh\nexec {sys.executable} {self.home}/{name} "$@"\n')
            target.chmod(0o755)
            (self.home / name).symlink_to(HERE / "juju_standin.py")

    def lane(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run the lane with this juju."""
        env = {
            **os.environ,
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "SLURM_DDP_POLL_S": "0.1",
            "SLURM_DDP_DIST": str(self.home / "dist"),
        }
        command = [
            *LANE,
            "-p",
            "without_libjuju",
            "--timeout",
            "300",
            *arguments,
            str(LANE_FILES / "test_cluster.py"),
        ]
        return subprocess.run(command, check=False, capture_output=True, text=True, env=env)

    def calls(self, command: str) -> list[list[str]]:
        """Return the arguments of each call of one of juju's commands, without the model."""
        lines = (self.home / "calls").read_text().splitlines()
        words = [line for line in map(json.loads, lines) if line[0] == command]
        return [line[3:] if line[1:2] == ["--model"] else line[1:] for line in words]


@pytest.mark.parametrize(("version", "overlays"), [("3.6.28", []), ("4.0.15", ["juju4"])])
def test_every_test_of_the_lane_passes(version: str, overlays: list[str]):
    place = Place(version)
    done = place.lane("-q")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^=+ \d+ passed in ", done.stdout, re.MULTILINE), done.stdout[
        -500:
    ]  # none skipped
    first, second, third = place.calls("deploy")
    assert first[0].endswith("/bundle.yaml")
    assert [pathlib.Path(word).stem for word in first[1:] if word != "--overlay"] == overlays
    assert second == first
    assert third[:-2] == first
    assert third[-1].endswith("/later.yaml")
    assert len(place.calls("destroy-model")) == 1
    named = place.calls("add-model")[0]
    assert any(word.startswith("jubilant-") for word in named) == version.startswith("4.")


@pytest.mark.parametrize(
    ("version", "constraints", "fails"),
    [
        ("3.6.28", "mem=4G", False),
        ("4.0.15", "arch=amd64 mem=4G", False),
        ("4.0.15", "mem=4G", True),
    ],
)
def test_juju_4_deploys_a_bundle_without_arch_once(
    tmp_path: pathlib.Path, version: str, constraints: str, fails: bool
):
    """As the stand-in plays it, so that the lane's tests can fail."""
    place = Place(version)
    bundle = tmp_path / "bundle.yaml"
    body = f"charm: ./dist/one.charm, num_units: 1, constraints: {constraints}"
    bundle.write_text(f"applications: {{one: {{{body}}}}}")
    juju = [place.home / "bin" / "juju"]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    subprocess.run([*juju, "add-model", "m"], check=True, env=env)
    deploy = [*juju, "deploy", "--model", "m", str(bundle)]
    subprocess.run(deploy, check=True, env=env)
    again = subprocess.run(deploy, check=False, env=env, capture_output=True, text=True)
    assert (again.returncode != 0) == fails
    assert ("cannot deploy local charm at ./dist/one: file does not exist" in again.stderr) == fails


def test_a_cluster_in_which_a_test_s_effect_is_missing_fails_it():
    place = Place("4.0.15")
    (place.home / "bin" / "sinfo").write_text("#!/bin/sh\necho slurmd-0 idle\necho slurmd-1 down\n")
    done = place.lane("-q", "-k", "two_idle_nodes")
    assert done.returncode == 1
    assert "'slurmd-1': 'down'" in done.stdout


def test_without_a_controller_the_lane_fails_in_one_line():
    place = Place("3.6.28")
    (place.home / "bin" / "juju").write_text(
        "#!/bin/sh\necho ERROR No controllers registered >&2\nexit 1\n"
    )
    done = place.lane("-q")
    assert done.returncode == 1
    assert (
        "integration: juju has no current controller; juju bootstrap makes one"
        in done.stdout + done.stderr
    )
