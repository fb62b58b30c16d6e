"""The Terraform modules against charmcraft.yaml and bundle.yaml, parsed. The workflow CI runs `tofu test`."""

import json
import pathlib
import re
from typing import Any

import hcl2
import pytest
import rules
import yaml

CHARMS = sorted(path.parent for path in (rules.ROOT / "charms").glob("*/charmcraft.yaml"))
PRODUCT = rules.ROOT / "terraform"
UPSTREAM = yaml.safe_load((rules.ROOT / "tests" / "bundle" / "upstream.yaml").read_text())
MODULES = [*(charm / "terraform" for charm in CHARMS), PRODUCT]
FILES = {"main.tf", "outputs.tf", "terraform.tf", "variables.tf"}  # Canonical's CC008
ARCH = "arch=amd64"  # what Juju 4 adds itself
EVERYWHERE = {"app_name", "base", "channel", "config", "model_uuid", "revision"}


def _plain(value: Any) -> Any:
    """Strip the quotes and marks from what hcl2 parsed."""
    if isinstance(value, dict):
        return {
            _plain(key): _plain(item)
            for key, item in value.items()
            if not str(key).startswith("__")
        }
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return (
        value[1:-1] if isinstance(value, str) and re.fullmatch(r'".*"', value, re.DOTALL) else value
    )


def parsed(path: pathlib.Path) -> dict[str, Any]:
    """Return a file's blocks, by type and name."""
    with path.open() as file:
        blocks: dict[str, list[dict[str, Any]]] = _plain(hcl2.load(file))
    found: dict[str, Any] = {}
    for kind, items in blocks.items():
        for item in items:
            if kind == "resource":
                for of, named in item.items():
                    found.setdefault(kind, {}).setdefault(of, {}).update(named)
            else:
                found.setdefault(kind, {}).update(item)
    return found


def inputs(module: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return a module's variables."""
    return parsed(module / "variables.tf")["variable"]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.parent.name)
def test_a_module_has_the_files_of_cc008_and_uses_what_it_declares(module: pathlib.Path):
    assert {path.name for path in module.glob("*.tf")} == FILES
    text = "".join(path.read_text() for path in module.glob("*.tf"))
    declared = set(inputs(module))
    assert set(re.findall(r"\bvar\.(\w+)", text)) == declared
    for name, variable in inputs(module).items():
        assert variable["description"].endswith("."), name
        assert "type" in variable
    providers = parsed(module / "terraform.tf")["terraform"]["required_providers"][0]
    assert providers == {"juju": {"source": "juju/juju", "version": "~> 1.0"}}, (
        "as upstream's modules, which are used beside"
    )


@pytest.mark.parametrize("charm", CHARMS, ids=lambda path: path.name)
def test_a_charm_s_module_is_of_its_charmcraft_yaml(charm: pathlib.Path):
    metadata = yaml.safe_load((charm / "charmcraft.yaml").read_text())
    is_subordinate = metadata.get("subordinate", False)
    expected = EVERYWHERE | (set() if is_subordinate else {"constraints", "machines", "units"})
    expected |= {"resources"} if metadata.get("resources") else set()
    expected |= {"storage_directives"} if metadata.get("storage") else set()
    variables = inputs(charm / "terraform")
    assert set(variables) == expected
    for option in ("resources", "storage"):
        name = "storage_directives" if option == "storage" else option
        for key in metadata.get(option, {}):
            assert key in variables[name]["description"]
    (application,) = parsed(charm / "terraform" / "main.tf")["resource"][
        "juju_application"
    ].values()
    (deployed,) = application["charm"]
    assert deployed["name"] == metadata["name"]
    assert variables["base"]["default"] + ":amd64" in metadata["platforms"]
    if not is_subordinate:
        assert variables["constraints"]["default"] == ARCH
    outputs = parsed(charm / "terraform" / "outputs.tf")["output"]
    for side in ("provides", "requires"):
        ends = {end.replace("-", "_"): end for end in metadata.get(side, {})}
        assert outputs[side]["value"] == ends


def test_every_application_with_units_has_the_bundle_s_constraints():
    bundle = yaml.safe_load(rules.BUNDLE.read_text())
    given = {
        name.replace("-", "_"): body["constraints"]
        for name, body in bundle["applications"].items()
        if "num_units" in body
    }
    text = (PRODUCT / "variables.tf").read_text()
    for name, constraints in given.items():
        (block,) = re.findall(rf'^variable "{name}" {{\n(.*?)^}}', text, re.MULTILINE | re.DOTALL)
        assert re.search(rf'constraints += optional\(string, "{constraints}"\)', block), name


def test_the_product_deploys_the_bundle():
    bundle = yaml.safe_load(rules.BUNDLE.read_text())
    main, variables = parsed(PRODUCT / "main.tf"), inputs(PRODUCT)
    applications = bundle["applications"]
    modules = main["module"]
    assert {name.replace("_", "-") for name in modules} | set(
        main["resource"]["juju_application"]
    ) == set(applications)
    for label, module in modules.items():
        name = label.replace("_", "-")
        charm = pathlib.PurePath(applications[name]["charm"]).stem
        assert f"/{charm}/terraform" in module["source"]
        upstream = module["source"].startswith("git::")
        channel = variables["slurm_channel" if upstream else "channel"]["default"]
        if upstream:
            assert applications[name]["channel"] == channel
            assert module["source"].endswith(
                "?ref=" + UPSTREAM["checkouts"]["slurm-charms"]["branch"]
            )
        for option, value in applications[name].get("options", {}).items():
            assert f"{option} = {json.dumps(value)}" in re.sub(" +", " ", module["config"]), name
        own = (
            None
            if upstream
            else parsed(rules.ROOT / "charms" / charm / "terraform" / "variables.tf")["variable"]
        )
        used = set(module) - {"source", "count"}
        assert own is None or used <= set(own)
        deployed = module.get("app_name") or (own["app_name"]["default"] if own else None)
        assert deployed == name
    mysql = main["resource"]["juju_application"]["mysql"]
    (charm,) = mysql["charm"]
    assert charm == {key: applications["mysql"][key] for key in ("base", "channel")} | {
        "name": "mysql"
    }
    text = (PRODUCT / "variables.tf").read_text()
    assert f'{{ profile = "{applications["mysql"]["options"]["profile"]}" }}' in text
    assert f"units       = optional(number, {applications['slurmd']['num_units']})" in text


def test_the_product_integrates_what_the_bundle_relates():
    bundle = yaml.safe_load(rules.BUNDLE.read_text())
    main = parsed(PRODUCT / "main.tf")
    default = "juicefs-server-proxy:filesystem"
    ends = main["locals"]["integrations"].values()
    ours = {frozenset(default if end.startswith("${") else end for end in pair) for pair in ends}
    assert ours == {frozenset(pair) for pair in bundle["relations"]}
    waits = set(main["resource"]["juju_integration"]["all"]["depends_on"])
    assert waits == {f"${{module.{label}}}" for label in main["module"]} | {
        "${juju_application.mysql}"
    }
