"""What this repository says of upstream is what the checkouts say: facts, stand-ins, sources."""

import importlib
import pathlib
import re
from typing import Any

import checkout
import pytest
import yaml

STANDINS = checkout.ROOT / "sandbox" / "standins"
PLAYED = sorted(path.parent.name for path in STANDINS.glob("*/charmcraft.yaml"))
OF_CHECKOUTS = {
    name: fact
    for name, fact in checkout.FACTS["charms"].items()
    if any(fact["source"].startswith(f"{c['repository']}@") for c in checkout.FACTS["checkouts"].values())
}
SOURCE = re.compile(r"\| `[\w./-]+\.py:\d+` \|")


def declared(name: str) -> dict[str, Any]:
    return yaml.safe_load((checkout.charm_folder(name) / "charmcraft.yaml").read_text())


def endpoints(charm: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return role -> endpoint -> what decides about relations."""
    return {
        role: {
            name: {key: spec[key] for key in ("interface", "scope", "limit") if key in spec}
            for name, spec in charm.get(role, {}).items()
        }
        for role in ("provides", "requires", "peers")
    }


@pytest.mark.parametrize("name", checkout.FACTS["checkouts"])
def test_the_checkout_is_the_commit_that_the_facts_are_from(name: str):
    assert checkout.commit(name) == checkout.FACTS["checkouts"][name]["commit"], (
        "upstream moved: read what changed, then name the new commit in tests/bundle/upstream.yaml"
    )


@pytest.mark.parametrize("name", OF_CHECKOUTS)
def test_the_facts_are_upstream_s(name: str):
    fact, charm = OF_CHECKOUTS[name], declared(name)
    commit = re.search(r"@([0-9a-f]{7}) (\S+)", fact["source"])
    assert commit is not None
    (of,) = (c for c in checkout.FACTS["checkouts"].values() if fact["source"].startswith(c["repository"]))
    assert of["commit"].startswith(commit[1])
    assert commit[2] == f"charms/{name}/charmcraft.yaml"
    found = endpoints(charm)
    for role in ("provides", "requires"):
        facts = {
            endpoint: {key: value for key, value in spec.items() if key != "required"}
            for endpoint, spec in fact.get(role, {}).items()
        }
        assert facts == found[role]
    assert fact["options"] == {
        option: spec["type"] for option, spec in charm.get("config", {}).get("options", {}).items()
    }
    (bases,) = {charm["base"]} if "base" in charm else {name.partition(":")[0] for name in charm["platforms"]}
    assert any(bases in of_channel for of_channel in fact["channels"].values())
    assert all(assumed == "juju" for assumed in charm.get("assumes", []))  # hence any Juju, 4 included


def test_every_charm_of_the_checkouts_that_the_bundle_takes_is_compared():
    assert {"slurmctld", "slurmd", "sackd", "slurmdbd", "slurmrestd", "nfs-server-proxy"} <= set(OF_CHECKOUTS)


@pytest.mark.parametrize("name", [name for name in PLAYED if name in OF_CHECKOUTS])
def test_a_stand_in_declares_what_upstream_declares(name: str):
    standin = yaml.safe_load((STANDINS / name / "charmcraft.yaml").read_text())
    charm = declared(name)
    ours, theirs = endpoints(standin), endpoints(charm)
    assert ours == theirs
    options, upstream = (
        {
            option: (spec["type"], spec.get("default"))
            for option, spec in one.get("config", {}).get("options", {}).items()
        }
        for one in (standin, charm)
    )
    assert options == upstream
    actions, upstream_actions = (
        {
            action: (
                {key: (spec.get("type"), spec.get("default")) for key, spec in body.get("params", {}).items()},
                sorted(body.get("required", [])),
            )
            for action, body in one.get("actions", {}).items()
        }
        for one in (standin, charm)
    )
    assert actions == upstream_actions


def test_the_words_that_the_table_of_the_stand_ins_quotes_stand_at_their_lines():
    rows = [line.split(" | ") for line in (STANDINS / "README.md").read_text().splitlines() if SOURCE.search(line)]
    assert rows
    assert [problem for _, source, words, _ in rows if (problem := wrong_source(source.strip("`"), words[1:-1]))] == []


def wrong_source(source: str, words: str) -> str | None:
    """Find the problem of a `file:line` of the table, if any; one of hpc-libs/ is in the library that is installed here."""
    name, _, line = source.partition(":")
    if name.startswith("hpc-libs/"):
        library: Any = importlib.import_module("charmed_hpc_libs")
        path = pathlib.Path(library.__file__).parent.parent / name.removeprefix("hpc-libs/src/")
    else:
        path = checkout.folder("slurm-charms") / name
    if not path.is_file():
        return f"{source}: no such file"
    lines = path.read_text().splitlines()
    there = lines[int(line) - 1].strip() if int(line) <= len(lines) else "nothing"
    return None if words in there else f"{source}: {there}, not {words}"
