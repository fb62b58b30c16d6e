"""Check, before a bundle is deployed, that Charmhub has a revision of each application for its channel and base.

    channels.py BUNDLE [OVERLAY...]

Reads `juju info CHARM --format json`, whose `channels` maps tracks to risks to revisions with their bases (Juju 3.6 and
4, cmd/juju/charmhub/data.go). A risk without a revision takes the one of the next more stable risk, which the table of
`juju info` marks with an arrow (infowriter.go). A client with --track (3.6) may leave out all tracks but one: a track
that `tracks` lists, or that the bundle asks for, is requested by name.
"""

import concurrent.futures
import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Any

import yaml

RISKS = ("stable", "candidate", "beta", "edge")  # the most stable first
ARCHITECTURE = "amd64"  # of every application in the bundle
TIMEOUT_S = 60


class InfoError(Exception):
    """`juju info` failed; the text is its last line."""


@dataclasses.dataclass(frozen=True)
class Application:
    """An application that Juju deploys from Charmhub."""

    name: str
    charm: str
    track: str
    risk: str
    base: str


def applications(paths: list[pathlib.Path]) -> list[Application]:
    """Return the applications from Charmhub of a bundle with overlays, merged as `juju deploy --overlay` does."""
    merged: dict[str, dict[str, Any]] = {}
    default_base = ""
    for path in paths:
        document = yaml.safe_load(path.read_text())
        default_base = document.get("default-base", default_base)
        changes: dict[str, dict[str, Any] | None] = document.get("applications") or {}
        for name, body in changes.items():
            if body:
                merged[name] = merged.get(name, {}) | body
            else:
                merged.pop(name, None)
    found: list[Application] = []
    for name, body in merged.items():
        charm = str(body["charm"]).removeprefix("ch:")
        if not charm.startswith((".", "/")):
            track, risk = split(str(body.get("channel", "")))
            found.append(Application(name, charm, track, risk, body.get("base", default_base)))
    return found


def split(channel: str) -> tuple[str, str]:
    """Return a channel's track and risk, with Juju's defaults for either."""
    track, _, risk = channel.partition("/")
    if not risk and track in RISKS:
        return "latest", track
    return track or "latest", risk.partition("/")[0] or "stable"


def info(charm: str, *arguments: str) -> dict[str, Any]:
    """Return the JSON object that `juju info` prints."""
    command = ["juju", "info", charm, "--format", "json", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
        return json.loads(done.stdout)
    except subprocess.CalledProcessError as e:
        raise InfoError((e.stderr.strip().splitlines() or [f"exit status {e.returncode}"])[-1]) from e
    except (subprocess.TimeoutExpired, ValueError) as e:
        raise InfoError(f"no answer: {e}") from e


def published(application: Application) -> tuple[bool, list[str]]:
    """Return whether the application's channel leads to a revision for its base, and the channels that hold one."""
    shown = info(application.charm)
    channels: dict[str, dict[str, list[dict[str, Any]]]] = shown["channels"]  # track, risk, revisions
    for track in {application.track, *shown.get("tracks", [])} - channels.keys():
        try:
            channels = info(application.charm, "--channel", f"{track}/{application.risk}")["channels"] | channels
        except InfoError:
            continue  # no such track
    holders = [
        f"{track}/{risk}"
        for track, risks in channels.items()
        for risk in RISKS
        if any(serves(revision, application.base) for revision in risks.get(risk, []))
    ]
    leads_to = {f"{application.track}/{risk}" for risk in RISKS[: RISKS.index(application.risk) + 1]}
    return not leads_to.isdisjoint(holders), holders


def serves(revision: dict[str, Any], base: str) -> bool:
    """Return whether a revision is for this base and architecture."""
    listed: list[dict[str, str]] = revision.get("bases") or []
    bases = {f"{one['name']}@{one['channel'].partition('/')[0]}" for one in listed}
    return ARCHITECTURE in revision["architectures"] and (not base or base.partition("/")[0] in bases)


def main(paths: list[str]) -> int:
    """Print one line for each application that Charmhub cannot serve; return an exit status."""
    is_missing = False
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = applications([pathlib.Path(path) for path in paths])
        answers = [(application, pool.submit(published, application)) for application in found]
    for application, answer in answers:
        try:
            is_there, holders = answer.result()
        except InfoError as e:
            print(f"deploy: {application.name}: not checked in Charmhub: {e}", file=sys.stderr)
            continue
        if not is_there:
            is_missing = True
            others = f"{', '.join(holders)} has one" if holders else "no channel has one"
            print(
                f"deploy: {application.name}: Charmhub has no revision of {application.charm} for {application.base} in"
                f" channel {application.track}/{application.risk}; {others}: set channel or base in an overlay",
                file=sys.stderr,
            )
    return int(is_missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
