"""scripts/deploy.sh with a juju that fails on a command it does not expect."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest
import rules

JUJU = """#!/bin/sh
echo "$*" >> "$0.calls"
case $* in
"show-model --format json") cat "$0.model" ;;
"deploy ./bundle.yaml"*) echo deployed ;;
*) echo "juju: $* is not known" >&2; exit 64 ;;
esac
"""


class Place:
    """A copy of what the script needs, with a juju before all others in PATH."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.juju = folder, folder / "bin" / "juju"
        shutil.copytree(rules.ROOT / "overlays", folder / "overlays")
        (folder / "scripts").mkdir()
        shutil.copy(rules.ROOT / "scripts" / "deploy.sh", folder / "scripts")
        (folder / "scripts" / "lanes.py").write_text("import sys\nassert sys.argv[1:] == ['pack']\nprint('packed')\n")
        self.juju.parent.mkdir()
        self.juju.write_text(JUJU)
        self.juju.chmod(0o755)
        self.on("aws")

    def on(self, cloud: str, version: str = "3.6.28") -> None:
        """Let the model be on a cloud of this type, with agents of this Juju."""
        body = {
            "name": "admin/training",
            "model-type": "iaas",
            "cloud": "mine",
            "type": cloud,
            "agent-version": version,
        }
        model = {"training": body}
        self.juju.with_name("juju.model").write_text(json.dumps(model))

    def fill_in(self, name: str) -> str:
        """Return the path of a copy of an overlay, filled in."""
        (self.folder / f"my-{name}.yaml").write_text(rules.filled(self.folder / "overlays" / f"{name}.yaml"))
        return f"my-{name}.yaml"

    def run(self, overlays: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.juju.parent}:{os.environ['PATH']}", "OVERLAYS": overlays}
        script = self.folder / "scripts" / "deploy.sh"
        return subprocess.run([script, *arguments], env=env, capture_output=True, text=True, check=False)

    def deployed(self, overlays: str, *arguments: str) -> list[str]:
        """Run the script: the arguments that `juju deploy` got."""
        done = self.run(overlays, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("packed\n")
        return self.juju.with_name("juju.calls").read_text().splitlines()[-1].split()[2:]

    def refusal(self, overlays: str) -> str:
        """Return the one line with which the script fails, before anything is packed or deployed."""
        done = self.run(overlays)
        assert done.returncode == 1
        assert done.stdout == ""
        calls = self.juju.with_name("juju.calls")
        assert not calls.exists() or "deploy" not in calls.read_text()
        (line,) = done.stderr.splitlines()
        return line


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Place:
    return Place(tmp_path)


def test_without_overlays_the_bundle_is_deployed_as_it_is(place: Place):
    assert place.deployed("", "--dry-run") == ["--dry-run"]


def test_on_lxd_its_overlay_comes_by_itself_and_once(place: Place):
    place.on("lxd")
    assert place.deployed("") == ["--overlay", "./overlays/lxd.yaml"]
    assert place.deployed("lxd") == ["--overlay", "./overlays/lxd.yaml"]
    own = place.fill_in("nfs")
    assert place.deployed(own) == ["--overlay", "./overlays/lxd.yaml", "--overlay", f"./{own}"], "one's own wins"


def test_several_overlays_in_the_order_given(place: Place):
    gpu, nfs = place.fill_in("gpu"), str(place.folder / place.fill_in("nfs"))
    assert place.deployed(f"{gpu} cos {nfs}") == [
        "--overlay", f"./{gpu}", "--overlay", "./overlays/cos.yaml", "--overlay", nfs,
    ]  # fmt: skip


def test_on_juju_4_its_overlay_comes_by_itself_and_once(place: Place):
    place.on("unmanaged", "4.0.15")
    assert place.deployed("") == ["--overlay", "./overlays/juju4.yaml"]
    assert place.deployed("juju4") == ["--overlay", "./overlays/juju4.yaml"]


def test_26_04_on_juju_4_is_refused(place: Place):
    place.on("aws", "4.0.15")
    assert "mysql needs a Juju below 4 and this model's is 4.0.15" in place.refusal("2604")


def test_machines_that_exist_are_mapped_and_come_first(place: Place):
    place.on("unmanaged", "4.0.15")
    own = place.fill_in("nfs")
    assert place.deployed(f"{own} machines") == [
        "--map-machines=existing",
        *("--overlay", "./overlays/machines.yaml", "--overlay", f"./{own}", "--overlay", "./overlays/juju4.yaml"),
    ]


def test_the_other_generation_comes_before_what_removes_applications(place: Place):
    own = place.fill_in("nfs")
    assert place.deployed(f"{own} 2604") == ["--overlay", "./overlays/2604.yaml", "--overlay", f"./{own}"]


@pytest.mark.parametrize("name", ["cephfs", "gpu", "lustre", "nfs"])
def test_what_is_not_filled_in_is_refused(place: Place, name: str):
    message = place.refusal(name)
    text = (rules.ROOT / "overlays" / f"{name}.yaml").read_text()
    line = next(n for n, one in enumerate(text.splitlines(), 1) if "*FILL-IN" in one and not one.startswith("#"))
    assert message.startswith(f"deploy: OVERLAYS: ./overlays/{name}.yaml line {line} is to be filled in: ")


def test_what_cannot_be_together_is_refused(place: Place):
    nfs, cephfs, gpu = (place.fill_in(name) for name in ("nfs", "cephfs", "gpu"))
    assert "nfs and cephfs: there is one shared filesystem; choose one" in place.refusal(f"{nfs} {cephfs}")
    assert "gpu and lxd: both say what machine" in place.refusal(f"{gpu} lxd")
    assert "gpu and machines: both say what machine" in place.refusal(f"{gpu} machines")
    assert "cos is given twice" in place.refusal("cos cos")
    assert "lxd is for LXD, and this model's cloud is aws" in place.refusal("lxd")
    place.on("lxd")
    assert "gpu asks for a cloud's machine types, and this model is on LXD" in place.refusal(gpu)


def test_an_overlay_that_is_not_there_is_named_with_those_that_are(place: Place):
    message = place.refusal("nsf")
    assert message == (
        "deploy: OVERLAYS: there is no overlays/nsf.yaml; there are: 2604 cephfs cos gpu juju4 lustre lxd machines nfs, or give a path"
    )


def test_without_a_model_or_a_juju_it_says_what_to_do(place: Place):
    place.juju.with_name("juju.model").unlink()
    assert "no current controller and model here: juju bootstrap lxd" in place.refusal("")
    place.juju.unlink()
    assert "the juju client is not installed: sudo snap install juju" in place.refusal("")
