"""Type every command of README, tutorial and how-tos in the sandbox, in the order of each page.

`./sandboxctl` stands for `juju`, user ubuntu at the login host for the reader. walk.toml has the
lines to skip and the values that depend on the deployment. The lane docs-walk runs this; `-k
submit` runs one page.
"""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import time

import pytest

from functional import pages, test_plain_slurm
from functional.conftest import Answer, Cluster
from functional.plain_slurm import PlainSlurm

LINE_S = 1200  # an environment may be made
QUEUE_S = 1800  # all jobs of a page
ENDED_WELL = {
    "COMPLETED",
    "CANCELLED",
    "UNKNOWN",
}  # UNKNOWN: of a sweep, and cancelled before it began
ON_THE_READERS_MACHINE = re.compile(r"\./sandboxctl |juju |cp overlays/|tar ")
NAMES_OF_JUJU = 'juju() { ./sandboxctl "$@"; }\n'
USAGE = re.compile(
    r"^Usage: ", re.MULTILINE
)  # also of a command inside $(...), whose status a shell drops
LOGIN = "sackd/0"
LINKS = ("sandboxctl", "bundle.yaml", "overlays")  # of the clone
plain = test_plain_slurm.plain  # its fixture


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader with a clone of the repository and an account on the login host."""

    cluster: Cluster
    clone: pathlib.Path

    def types(self, text: str) -> Answer:
        """Type a command where its page does."""
        if not ON_THE_READERS_MACHINE.match(text):
            return self.cluster.exec(LOGIN, "runuser", "-l", "ubuntu", "-c", text, timeout=LINE_S)
        env = os.environ | {"SLURM_DDP_MODEL": self.cluster.model}
        argv = ["bash", "-c", NAMES_OF_JUJU + text]
        done = subprocess.run(
            argv,
            cwd=self.clone,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LINE_S,
            check=False,
        )
        return Answer(
            done.returncode,
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
        )

    def writes(self, name: str, text: str) -> None:
        """Write a file that a page shows into the clone and into the home of the login host."""
        (self.clone / name).write_text(text)
        prepare(
            self,
            f"tar -c {name} | ./sandboxctl exec sackd/0 -- tar -x -C /home/ubuntu --no-same-owner",
        )


@dataclasses.dataclass(frozen=True)
class PlainReader:
    """A reader with an account on a Slurm without charms."""

    slurm: PlainSlurm

    def types(self, text: str) -> Answer:
        """Type a command on the login node."""
        done = self.slurm.tries(text, timeout=LINE_S)
        return Answer(done.code, done.out, done.err)

    def writes(self, name: str, text: str) -> None:
        """Write a file that a page shows."""
        self.slurm.writes(name, text)


@pytest.fixture
def reader(
    request: pytest.FixtureRequest, page: str, tmp_path: pathlib.Path
) -> Reader | PlainReader:
    if page.endswith("plain-slurm.md"):
        return PlainReader(request.getfixturevalue("plain"))
    for name in LINKS:
        (tmp_path / name).symlink_to(pages.ROOT / name)
    return Reader(request.getfixturevalue("cluster"), tmp_path)


def prepare(reader: Reader | PlainReader, *texts: str) -> None:
    """Type the prerequisites of a page."""
    for text in texts:
        answer = reader.types(text)
        assert answer.code == 0, (
            f"before or after the page: {text}: {answer.out[-2000:]}{answer.err[-2000:]}"
        )


def await_jobs(reader: Reader | PlainReader) -> list[str]:
    """Wait until no job is left; return the runs that failed."""
    deadline = time.monotonic() + QUEUE_S
    while queue := reader.types("squeue --noheader --format '%j %T %r'").out:
        if time.monotonic() > deadline:
            return [f"jobs that do not end: {queue}"]
        time.sleep(2)
    runs = json.loads(reader.types("ddp --json list").out)["runs"]
    return [f"{run['run']}: {run['state']}" for run in runs if run["state"] not in ENDED_WELL]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("page", pages.PAGES)
def test_what_a_page_types_works(reader: Reader | PlainReader, page: str):
    about = pages.WALK["pages"].get(page, {})
    reader.types("rm -rf /mnt/shared/runs/*")
    script, *_ = pages.files("docs/howto/script.md")
    reader.writes("train.py", script)
    for name, text in zip(about.get("files", ()), pages.files(page), strict=False):
        reader.writes(name, text)
    prepare(reader, *about.get("before", ()))
    problems: list[str] = []
    for line in pages.lines(page):
        if line.reason is not None:
            continue
        text = line.text
        for shown, value in about.get("values", {}).items():
            text = text.replace(shown, value)
        begin = time.monotonic()
        answer = reader.types(text)
        print(
            f"{line} [{time.monotonic() - begin:.0f} s]\n{answer.out[-600:]}{answer.err[-600:]}",
            flush=True,
        )
        is_wrong = answer.code != 0 or bool(USAGE.search(answer.err))
        if is_wrong != (line.text in about.get("fails", ())):
            problems.append(
                f"{line}: exit status {answer.code}\n{answer.out[-1500:]}{answer.err[-1500:]}"
            )
    problems += await_jobs(reader)
    prepare(reader, *about.get("after", ()))
    assert not problems, "\n".join(problems)
