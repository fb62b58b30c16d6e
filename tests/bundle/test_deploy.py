"""scripts/deploy.sh with a juju that fails on a command it does not expect."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import deployments
import pytest

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
# convert.go, info.go, info_test.go). Juju 4 lists all tracks in any case; a 3.6 with --track may list the default track
# alone (here the first), and of a channel that it is asked for only that risk.
INFO = f"""#!{sys.executable}
import json, pathlib, sys
name, *words = sys.argv[1:]
assert words[:2] == ["--format", "json"] and words[2:3] in ([], ["--channel"]), words
place = pathlib.Path(__file__)
published = json.loads(place.with_name("charmhub.json").read_text())
if name not in published:
    sys.exit(f'ERROR No information found for charm or bundle with the name "{{name}}"')
channels = published[name]
if place.with_name("one-track").exists():
    track, _, risk = words[3].partition("/") if words[2:] else (next(iter(channels)), "", "")
    risks = channels.get(track, {{}})
    risks = {{risk: risks[risk]}} if risk in risks else {{}} if risk else risks
    channels = {{track: risks}} if risks else {{}}
about = dict.fromkeys(("id", "description", "publisher", "summary", "store-url"), "")
about["supports"] = [{{"name": "ubuntu", "channel": "26.04"}}]
tracks = {{"tracks": list(channels)}} if channels else {{}}
print(json.dumps({{"type": "charm", "name": name, **about, "charm": {{}}, "channels": channels, **tracks}}))
"""


def revision(
    track: str, risk: str, number: int, *bases: str, architecture: str = "amd64"
) -> dict[str, Any]:
    """Return a revision as `juju info` lists it."""
    of_bases = [{"name": "ubuntu", "channel": base} for base in bases]
    about = {
        "version": str(number),
        "revision": number,
        "released-at": "2026-06-22T19:44:44+00:00",
        "size": 12042240,
    }
    return {
        "track": track,
        "risk": risk,
        **about,
        "architectures": [architecture],
        "bases": of_bases,
    }


def charmhub() -> dict[str, Any]:
    """Return Charmhub's revisions of each charm in tests/bundle/upstream.yaml, by charm, track and risk."""
    facts = deployments.facts()["charms"]
    found: dict[str, Any] = {}
    for name, fact in facts.items():
        for channel, bases in fact["channels"].items():
            track, _, risk = channel.partition("/")
            numbered = enumerate(reversed(bases), start=1)
            of_risk = [
                revision(track, risk, number, base.partition("@")[2]) for number, base in numbered
            ]
            found.setdefault(name, {}).setdefault(track, {})[risk] = of_risk
    return found


class Place:
    """A copy of the files that the script needs, with a fake juju first in PATH."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.juju = folder, folder / "bin" / "juju"
        shutil.copytree(deployments.ROOT / "overlays", folder / "overlays")
        (folder / "lib").symlink_to(deployments.ROOT / "lib")
        (folder / "scripts").mkdir()
        shutil.copy(deployments.BUNDLE, folder)
        for name in ("deploy.sh", "channels.py"):
            shutil.copy(deployments.ROOT / "scripts" / name, folder / "scripts")
        (folder / "scripts" / "venv.sh").symlink_to("/bin/true")
        (folder / "build" / "venvs" / "deploy" / "bin").mkdir(parents=True)
        (folder / "build" / "venvs" / "deploy" / "bin" / "python").symlink_to(sys.executable)
        (folder / "scripts" / "lanes.py").write_text(
            "import sys\nassert sys.argv[1:] == ['pack']\nprint('packed')\n"
        )
        self.juju.parent.mkdir()
        self.juju.write_text(JUJU)
        self.juju.chmod(0o755)
        self.juju.with_name("info").write_text(INFO)
        self.juju.with_name("info").chmod(0o755)
        for name in ("cephfs", "gpu", "nfs"):
            (folder / f"my-{name}.yaml").write_text(
                deployments.filled(folder / "overlays" / f"{name}.yaml")
            )
        self.publish(charmhub())
        self.on("aws")

    def publish(self, channels: dict[str, Any]) -> None:
        """Let Charmhub have these channels of each charm."""
        self.juju.with_name("charmhub.json").write_text(json.dumps(channels))

    def on(self, cloud: str, version: str = "3.6.28") -> None:
        """Let the model be on a cloud of this type, with agents of this Juju."""
        model = {"training": {"name": "admin/training", "type": cloud, "agent-version": version}}
        self.juju.with_name("juju.model").write_text(json.dumps(model))

    def run(self, overlays: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{self.juju.parent}:{os.environ['PATH']}", "OVERLAYS": overlays}
        script = self.folder / "scripts" / "deploy.sh"
        return subprocess.run(
            [script, *arguments], env=env, capture_output=True, text=True, check=False
        )

    def deployed(self, overlays: str, *arguments: str) -> list[str]:
        """Run the script: the arguments that `juju deploy` got."""
        done = self.run(overlays, *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("packed\n")
        return self.juju.with_name("juju.calls").read_text().splitlines()[-1].split()[2:]

    def refusal(self, overlays: str) -> str:
        """Return the one line of the script's failure, before anything is packed or deployed."""
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


LXD, JUJU4, MACHINES = "./overlays/lxd.yaml", "./overlays/juju4.yaml", "./overlays/machines.yaml"
# The model's cloud and Juju, OVERLAYS (my-*.yaml are copies that are filled in), the overlays of `juju deploy` in their order
DEPLOYED = [
    ("aws", "3.6.28", "", []),
    (
        "aws",
        "3.6.28",
        "my-gpu.yaml cos my-nfs.yaml",
        ["./my-gpu.yaml", "./overlays/cos.yaml", "./my-nfs.yaml"],
    ),
    ("aws", "3.6.28", "my-nfs.yaml 2604", ["./overlays/2604.yaml", "./my-nfs.yaml"]),
    ("aws", "3.6.28", "my-gpu.yaml 2604", ["./overlays/2604.yaml", "./my-gpu.yaml"]),
    (
        "aws",
        "3.6.28",
        "cos ha 2604",
        [
            "./overlays/2604.yaml",
            "./overlays/cos.yaml",
            "./overlays/2604/cos.yaml",
            "./overlays/ha.yaml",
            "./overlays/2604/ha.yaml",
        ],
    ),
    (
        "unmanaged",
        "3.6.28",
        "2604 machines",
        ["./overlays/2604.yaml", MACHINES, "./overlays/2604/machines.yaml"],
    ),
    ("aws", "4.0.15", "2604", ["./overlays/2604.yaml", JUJU4, "./overlays/2604/juju4.yaml"]),
    ("lxd", "3.6.28", "", [LXD]),
    ("lxd", "3.6.28", "lxd", [LXD]),
    ("lxd", "3.6.28", "my-nfs.yaml", [LXD, "./my-nfs.yaml"]),
    ("unmanaged", "4.0.15", "", [JUJU4]),
    ("unmanaged", "4.0.15", "juju4", [JUJU4]),
    ("unmanaged", "4.0.15", "my-nfs.yaml machines", [MACHINES, "./my-nfs.yaml", JUJU4]),
]
REFUSED = [
    (
        "aws",
        "3.6.28",
        "my-nfs.yaml my-cephfs.yaml",
        "nfs and cephfs: there is one shared filesystem; choose one",
    ),
    ("aws", "3.6.28", "my-gpu.yaml lxd", "gpu and lxd: both say what machine"),
    ("aws", "3.6.28", "my-gpu.yaml machines", "gpu and machines: both say what machine"),
    ("aws", "3.6.28", "cos cos", "cos is given twice"),
    ("aws", "3.6.28", "lxd", "lxd is for LXD, and this model's cloud is aws"),
    (
        "lxd",
        "3.6.28",
        "my-gpu.yaml",
        "gpu asks for a cloud's machine types, and this model is on LXD",
    ),
    ("unmanaged", "4.0.15", "2604 machines", "2604 and machines: on Juju 4.0.15 mysql-proxy"),
    ("aws", "3.6.28", "lustre-server my-nfs.yaml", "lustre-server and nfs: there is one shared"),
    (
        "aws",
        "3.6.28",
        "nsf",
        "there is no overlays/nsf.yaml; there are: 2604 cephfs cos fair-share gpu ",
    ),
]


@pytest.mark.parametrize(("cloud", "version", "overlays", "expected"), DEPLOYED, ids=str)
def test_overlays_are_chosen_and_ordered(
    place: Place, cloud: str, version: str, overlays: str, expected: list[str]
):
    place.on(cloud, version)
    mapped = ["--map-machines=existing"] if MACHINES in expected else []
    words = [word for path in expected for word in ("--overlay", path)]
    assert place.deployed(overlays, "--dry-run") == [*mapped, "--dry-run", *words]


@pytest.mark.parametrize(("cloud", "version", "overlays", "message"), REFUSED, ids=str)
def test_what_cannot_be_deployed_is_refused(
    place: Place, cloud: str, version: str, overlays: str, message: str
):
    place.on(cloud, version)
    assert message in place.refusal(overlays)


@pytest.mark.parametrize("name", ["cephfs", "gpu", "lustre", "nfs"])
def test_an_overlay_that_is_not_filled_in_is_refused_with_its_line(place: Place, name: str):
    text = (deployments.ROOT / "overlays" / f"{name}.yaml").read_text()
    line = next(
        n
        for n, one in enumerate(text.splitlines(), 1)
        if "*FILL-IN" in one and not one.startswith("#")
    )
    assert (
        f"deploy: OVERLAYS: ./overlays/{name}.yaml line {line} is to be filled in: "
        in place.refusal(name)
    )


def test_without_a_model_or_a_juju_it_says_what_to_do(place: Place):
    place.juju.with_name("juju.model").unlink()
    assert "no current controller and model here: juju bootstrap lxd" in place.refusal("")
    place.juju.unlink()
    assert "the juju client is not installed: sudo snap install juju" in place.refusal("")


def test_the_versions_of_slurm_with_all_security_fixes_are_named(place: Place):
    shown = place.run("").stdout.splitlines()
    (line,) = (one for one in shown if "security fixes" in one)
    assert line.startswith("deploy: Slurm has its security fixes from 25.05.9 or 25.11.8 or 26.05")


NONE = "deploy: slurmd: Charmhub has no revision of slurmd for ubuntu@24.04 in channel latest/edge; {}: set channel or base"
# Whether `juju info` lists one track, slurmd's revisions in Charmhub, and the only line of standard error
CHECKED = [
    (
        False,
        ["latest/edge 26.04 amd64", "25.11/edge 24.04 amd64"],
        NONE.format("25.11/edge has one"),
    ),
    (False, ["latest/edge 24.04 arm64"], NONE.format("no channel has one")),
    (
        False,
        ["latest/edge 24.04 arm64", "latest/edge 24.04 amd64"],
        "",
    ),  # a revision for each architecture
    (False, ["25.11/stable 24.04 amd64"], NONE.format("25.11/stable has one")),
    (False, ["latest/beta 24.04 amd64", "latest/edge 26.04 amd64"], ""),  # edge leads to beta
    (True, ["25.11/edge 24.04 amd64", "latest/edge 24.04 amd64"], ""),
    (True, ["25.11/edge 24.04 amd64", "latest/stable 24.04 amd64"], ""),
    (
        True,
        ["25.11/edge 24.04 amd64", "latest/edge 26.04 amd64"],
        NONE.format("25.11/edge has one"),
    ),
    (
        False,
        [],
        'deploy: slurmd: not checked in Charmhub: ERROR No information found for charm or bundle with the name "',
    ),
]


@pytest.mark.parametrize(("has_one_track", "revisions", "line"), CHECKED, ids=str)
def test_charmhub_is_asked_for_a_revision_that_fits(
    place: Place, has_one_track: bool, revisions: list[str], line: str
):
    published = charmhub() | {"slurmd": {}}
    if has_one_track:
        place.juju.with_name("one-track").touch()
    for number, words in enumerate(revisions):
        channel, base, architecture = words.split()
        track, _, risk = channel.partition("/")
        listed = published["slurmd"].setdefault(track, {}).setdefault(risk, [])
        listed.append(revision(track, risk, number, base, architecture=architecture))
    if not revisions:
        del published["slurmd"]
    place.publish(published)
    done = place.run("")
    assert [text[: len(line)] for text in done.stderr.splitlines()] == ([line] if line else [])
    assert ("packed" in done.stdout) == (done.returncode == 0) == (not line.startswith(NONE[:30]))


@pytest.mark.parametrize(
    ("overlay", "line"),
    [
        (
            "{slrumctld: {channel: edge}}",
            "my.yaml: no application slrumctld in the bundle; did you mean slurmctld?",
        ),
        ("{grafana: {channel: edge}}", "my.yaml: no application grafana in the bundle"),
        (
            "{slurmd: {channel: 25.11/sharp}}",
            "slurmd: channel 25.11/sharp: no risk sharp; use one of stable, candidate",
        ),
        ("{slurmd: {channel: edge}", "my.yaml line 2: not YAML: expected ',' or '}'"),
    ],
)
def test_a_mistake_in_an_overlay_is_named(place: Place, overlay: str, line: str):
    (place.folder / "my.yaml").write_text(f"applications: {overlay}\n")
    assert place.refusal("./my.yaml").startswith(f"deploy: {line}")


@pytest.mark.parametrize(
    ("version", "overlays", "is_refused"),
    [
        ("3.6.28", "./my.yaml", False),
        ("4.0.15", "./my.yaml", True),
        ("4.0.15", "juju4 ./my.yaml", True),
    ],
)
def test_juju_4_gets_no_constraints_without_the_architecture(
    place: Place, version: str, overlays: str, is_refused: bool
):
    """They could be deployed once, and nothing after them."""
    place.on("aws", version)
    overlay = place.folder / "my.yaml"
    overlay.write_text("applications:\n  slurmd:\n    # constraints: x\n    constraints: mem=8G\n")
    if not is_refused:
        assert "./my.yaml" in place.deployed(overlays)
        return
    assert "OVERLAYS: ./my.yaml line 4: constraints without arch=amd64" in place.refusal(overlays)
    overlay.write_text("applications:\n  slurmd:\n    constraints: mem=8G arch=amd64\n")
    assert "./my.yaml" in place.deployed(overlays)
