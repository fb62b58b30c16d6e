"""This repository's claims about upstream match the checkouts: facts, stand-ins, sources."""

from typing import Any

import checkout
import pytest
import yaml

STANDINS = checkout.ROOT / "sandbox" / "standins"
PLAYED = sorted(path.parent.name for path in STANDINS.glob("*/charmcraft.yaml"))
OF_CHECKOUTS = {
    name: fact
    for name, fact in checkout.FACTS["charms"].items()
    if any(
        fact["source"].startswith(f"{c['repository']}@{c['commit'][:7]} charms/")
        for c in checkout.FACTS["checkouts"].values()
    )
}


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


@pytest.mark.parametrize("name", checkout.CHECKOUTS)
def test_the_checkout_is_the_commit_that_the_facts_are_from(name: str):
    assert checkout.commit(name) == checkout.FACTS["checkouts"][name]["commit"], (
        "upstream moved: read what changed, then name the new commit in tests/bundle/upstream.yaml"
    )


@pytest.mark.parametrize("name", OF_CHECKOUTS)
def test_the_facts_are_upstream_s(name: str):
    fact, charm = OF_CHECKOUTS[name], declared(name)
    assert fact["source"].endswith(f" charms/{name}/charmcraft.yaml")
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
    (bases,) = (
        {charm["base"]}
        if "base" in charm
        else {name.partition(":")[0] for name in charm["platforms"]}
    )
    assert any(bases in of_channel for of_channel in fact["channels"].values())
    assert all(
        assumed == "juju" for assumed in charm.get("assumes", [])
    )  # hence any Juju, 4 included


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
                {
                    key: (spec.get("type"), spec.get("default"))
                    for key, spec in body.get("params", {}).items()
                },
                sorted(body.get("required", [])),
            )
            for action, body in one.get("actions", {}).items()
        }
        for one in (standin, charm)
    )
    differences = (STANDINS / "README.md").read_text().partition("## What differs")[2]
    assert actions == {
        key: value for key, value in upstream_actions.items() if key not in differences
    }
