"""Check that Charmhub has a revision of each of a bundle's applications for its channel and base.

    channels.py BUNDLE [OVERLAY...]

Run it before a deployment. Reads `juju info CHARM --format json`, whose `channels` maps tracks to
risks to revisions with their bases (Juju 3.6 and 4, cmd/juju/charmhub/data.go). A risk without a
revision takes the revision of the next more stable risk, which the table of `juju info` marks with
an arrow (infowriter.go). A client with --track (3.6) may leave out all tracks but one: a track that
`tracks` lists, or that the bundle asks for, is requested by name. With `--channel TRACK/RISK` such
a client lists that risk alone (info.go), so the more stable ones are requested, too.
"""

import concurrent.futures
import contextlib
import dataclasses
import difflib
import json
import pathlib
import subprocess
import sys
from typing import Any

import yaml

RISKS = ("stable", "candidate", "beta", "edge")  # the most stable first
ARCHITECTURE = "amd64"  # of every application in the bundle
TIMEOUT_S = 60


class BundleError(Exception):
    """A bundle or an overlay has a mistake; the text is one line."""


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
    """Return a bundle's applications from Charmhub, with overlays merged as `juju deploy` does.

    Raises:
        BundleError: a file is not YAML, an application has no charm, or a channel's risk is unknown
            to Juju.
    """
    found: list[Application] = []
    for name, body in _merge(paths).items():
        charm = str(body["charm"]).removeprefix("ch:")
        if charm.startswith((".", "/")):
            continue
        track, risk = split(str(body.get("channel", "")))
        if risk not in RISKS:
            known = f"use one of {', '.join(RISKS)}"
            raise BundleError(f"{name}: channel {body['channel']}: no risk {risk}; {known}")
        found.append(Application(name, charm, track, risk, body["base"]))
    return found


def _merge(paths: list[pathlib.Path]) -> dict[str, dict[str, Any]]:
    """Merge the applications of a bundle with overlays, and add missing bases."""
    merged: dict[str, dict[str, Any]] = {}
    default_base = ""
    for path in paths:
        for document in documents(path):
            default_base = document.get("default-base", default_base)
            _apply(merged, document.get("applications") or {}, path)
    return {name: {"base": default_base, **body} for name, body in merged.items()}


def _apply(
    merged: dict[str, dict[str, Any]],
    changes: dict[str, dict[str, Any] | None],
    path: pathlib.Path,
) -> None:
    for name, body in changes.items():
        if not body:
            merged.pop(name, None)
            continue
        changed = merged.get(name, {}) | body
        if "charm" not in changed:
            close = difflib.get_close_matches(name, merged, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise BundleError(f"{path}: no application {name} in the bundle{hint}")
        merged[name] = changed


def documents(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the YAML documents in a file that hold anything. Raises BundleError."""
    try:
        return [document for document in yaml.safe_load_all(path.read_text()) if document]
    except yaml.MarkedYAMLError as e:
        line = f" line {e.problem_mark.line + 1}" if e.problem_mark else ""
        raise BundleError(f"{path}{line}: not YAML: {e.problem}") from e


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
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        )
        return json.loads(done.stdout)
    except subprocess.CalledProcessError as e:
        raise InfoError(
            (e.stderr.strip().splitlines() or [f"exit status {e.returncode}"])[-1]
        ) from e
    except subprocess.TimeoutExpired as e:
        raise InfoError(f"no answer from juju info within {TIMEOUT_S} s") from e
    except ValueError as e:
        raise InfoError("juju info printed no JSON") from e


def published(application: Application) -> tuple[bool, list[str]]:
    """Return whether the channel has a revision for the base, and the channels that do."""
    about = info(application.charm)
    channels: dict[str, dict[str, list[dict[str, Any]]]] = dict(
        about["channels"]
    )  # track, risk, revisions
    leads_to = {
        f"{application.track}/{risk}" for risk in RISKS[: RISKS.index(application.risk) + 1]
    }
    for channel in leads_to | {f"{track}/{application.risk}" for track in about.get("tracks", [])}:
        if channel.partition("/")[0] not in about["channels"]:
            with contextlib.suppress(InfoError):  # no such track
                for track, risks in info(application.charm, "--channel", channel)[
                    "channels"
                ].items():
                    channels[track] = channels.get(track, {}) | risks
    holders: list[str] = []
    for track, risks in channels.items():
        for risk in RISKS:
            revisions = risks.get(risk, [])
            if any(serves(revision, application.base) for revision in revisions):
                holders.append(f"{track}/{risk}")
    return not leads_to.isdisjoint(holders), holders


def serves(revision: dict[str, Any], base: str) -> bool:
    """Return whether a revision is for this base and architecture."""
    listed: list[dict[str, str]] = revision.get("bases") or []
    bases = {f"{one['name']}@{one['channel'].partition('/')[0]}" for one in listed}
    return ARCHITECTURE in revision["architectures"] and (
        not base or base.partition("/")[0] in bases
    )


def main(paths: list[str]) -> int:
    """Print one line for each application that Charmhub cannot serve; return an exit status."""
    is_missing = False
    try:
        found = applications([pathlib.Path(path) for path in paths])
    except BundleError as e:
        print(f"deploy: {e}", file=sys.stderr)
        return 1
    with concurrent.futures.ThreadPoolExecutor() as pool:
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
