"""scripts/deploy.sh with a juju that fails on a command it does not expect."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
import rules

JUJU = """#!/bin/sh
echo "$*" >> "$0.calls"
case $* in
"show-model --format json") cat "$0.model" ;;
"deploy ./bundle.yaml"*) echo deployed ;;
"info "*) shift; exec "$(dirname "$0")/info" "$@" ;;
*) echo "juju: $* is not known" >&2; exit 64 ;;
esac
"""


# `juju info CHARM --format json [--channel CHANNEL]`, as cmd/juju/charmhub of Juju 3.6 and 4 prints it (data.go,
# info_test.go). If a file `one-track` is there: a client of 3.6 with --track, which prints one track.
INFO = f"""#!{sys.executable}
import json, pathlib, sys
name, *words = sys.argv[1:]
assert words[:2] == ["--format", "json"] and words[2:3] in ([], ["--channel"]), words
published = json.loads(pathlib.Path(__file__).with_name("charmhub.json").read_text())
if published is None:
    sys.exit("ERROR Get https://api.charmhub.io/v2/charms/info: dial tcp: lookup api.charmhub.io: no such host")
channels = published[name]
tracks = list(channels)
if pathlib.Path(__file__).with_name("one-track").exists():
    track = words[3].partition("/")[0] if words[3:] else tracks[0]
    channels = {{track: channels.get(track, {{}})}}
about = dict.fromkeys(("id", "description", "publisher", "summary", "store-url"), "")
print(json.dumps({{"type": "charm", "name": name, "charm": {{}}, "channels": channels, "tracks": tracks, **about}}))
"""


def revision(track: str, risk: str, number: int, *bases: str) -> dict[str, Any]:
    """Return a revision as `juju info` lists it."""
    return {
        "track": track,
        "risk": risk,
        "version": str(number),
        "revision": number,
        "released-at": "2026-06-22T19:44:44.076943+00:00",
        "size": 12042240,
        "architectures": ["amd64"],
        "bases": [{"name": "ubuntu", "channel": base} for base in bases],
    }


def charmhub() -> dict[str, Any]:
    """Return Charmhub's revisions of each charm in tests/bundle/upstream.yaml, by charm, track and risk."""
    facts = rules.yaml.safe_load((rules.ROOT / "tests" / "bundle" / "upstream.yaml").read_text())["charms"]
    found: dict[str, Any] = {}
    for name, fact in facts.items():
        for channel, bases in fact["channels"].items():
            track, _, risk = channel.partition("/")
            numbered = enumerate(reversed(bases), start=1)
            of_risk = [revision(track, risk, number, base.partition("@")[2]) for number, base in numbered]
            found.setdefault(name, {}).setdefault(track, {})[risk] = of_risk
    return found


class Place:
    """A copy of what the script needs, with a juju before all others in PATH."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.juju = folder, folder / "bin" / "juju"
        shutil.copytree(rules.ROOT / "overlays", folder / "overlays")
        (folder / "scripts").mkdir()
        shutil.copy(rules.BUNDLE, folder)
        for name in ("deploy.sh", "channels.py"):
            shutil.copy(rules.ROOT / "scripts" / name, folder / "scripts")
        (folder / "scripts" / "venv.sh").write_text("#!/bin/sh\nexit 0\n")
        (folder / "scripts" / "venv.sh").chmod(0o755)
        (folder / "build" / "venvs" / "deploy" / "bin").mkdir(parents=True)
        (folder / "build" / "venvs" / "deploy" / "bin" / "python").symlink_to(sys.executable)
        (folder / "scripts" / "lanes.py").write_text("import sys\nassert sys.argv[1:] == ['pack']\nprint('packed')\n")
        self.juju.parent.mkdir()
        self.juju.write_text(JUJU)
        self.juju.chmod(0o755)
        self.juju.with_name("info").write_text(INFO)
        self.juju.with_name("info").chmod(0o755)
        self.publish(charmhub())
        self.on("aws")

    def publish(self, channels: dict[str, Any] | None, *, shows_one_track: bool = False) -> None:
        """Let Charmhub have these channels of each charm; None: it does not answer."""
        self.juju.with_name("charmhub.json").write_text(json.dumps(channels))
        if shows_one_track:
            self.juju.with_name("one-track").touch()

    def on(self, cloud: str, version: str = "3.6.28") -> None:
        """Let the model be on a cloud of this type, with agents of this Juju."""
        model = {"training": {"name": "admin/training", "type": cloud, "agent-version": version}}
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
    wanted = [word for path in (f"./{gpu}", "./overlays/cos.yaml", nfs) for word in ("--overlay", path)]
    assert place.deployed(f"{gpu} cos {nfs}") == wanted


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


def test_each_application_has_a_revision_in_charmhub(place: Place):
    done = place.run("2604 cos")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shows_one_track", [False, True], ids=["all tracks", "one track"])
def test_an_application_without_a_revision_is_named_with_the_channels_that_have_one(
    place: Place, shows_one_track: bool
):
    published = charmhub()
    published["slurmd"] = {
        "latest": {"edge": [revision("latest", "edge", 184, "26.04")]},
        "25.11": {"edge": [revision("25.11", "edge", 175, "24.04")]},
    }
    place.publish(published, shows_one_track=shows_one_track)
    assert place.refusal("") == (
        "deploy: slurmd: Charmhub has no revision of slurmd for ubuntu@24.04 in channel latest/edge; 25.11/edge has one:"
        " set channel or base in an overlay"
    )
    place.deployed("2604")


def test_a_channel_leads_to_the_revision_of_a_more_stable_risk_and_only_there(place: Place):
    published = charmhub() | {"mysql": {"8.0": {"edge": [revision("8.0", "edge", 300, "22.04")]}, "8.4": {}}}
    place.publish(published)
    assert "mysql for ubuntu@22.04 in channel 8.0/stable; 8.0/edge has one" in place.refusal("")
    place.publish(charmhub() | {"sackd": {"latest": {"stable": [revision("latest", "stable", 70, "22.04", "24.04")]}}})
    place.deployed("")


def test_a_charm_without_any_revision_for_the_architecture_is_named(place: Place):
    published = charmhub()
    published["sackd"]["latest"]["edge"] = [revision("latest", "edge", 78, "24.04") | {"architectures": ["arm64"]}]
    place.publish(published)
    assert "in channel latest/edge; no channel has one" in place.refusal("")


def test_where_charmhub_does_not_answer_juju_decides(place: Place):
    place.publish(None)
    done = place.run("")
    assert done.returncode == 0
    assert "deploy: slurmd: not checked in Charmhub: ERROR Get https://api.charmhub.io/" in done.stderr
