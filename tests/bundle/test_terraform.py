"""The Terraform modules against charmcraft.yaml and bundle.yaml, parsed.

The workflow CI runs `tofu test`.
"""

import json
import pathlib
import re
from typing import Any

import deployments
import hcl2
import pytest
import yaml

CHARMS = sorted(path.parent for path in (deployments.ROOT / "charms").glob("*/charmcraft.yaml"))
PRODUCT = deployments.ROOT / "terraform"
MODULES = [*(charm / "terraform" for charm in CHARMS), PRODUCT]
FILES = {"main.tf", "outputs.tf", "terraform.tf", "variables.tf"}  # Canonical's CC008
ARCH = "arch=amd64"  # what Juju 4 adds itself
PROVIDER = ">= 1.0, < 3.0"  # 2.0 is the first for Juju 4
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
    assert providers == {"juju": {"source": "juju/juju", "version": PROVIDER}}


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
    bundle = yaml.safe_load(deployments.BUNDLE.read_text())
    given = {
        name.replace("-", "_"): body["constraints"]
        for name, body in bundle["applications"].items()
        if "num_units" in body
    }
    text = (PRODUCT / "variables.tf").read_text()
    for name, constraints in given.items():
        (block,) = re.findall(rf'^variable "{name}" {{\n(.*?)^}}', text, re.MULTILINE | re.DOTALL)
        assert re.search(rf'constraints += optional\(string, "{constraints}"\)', block), name


def deployed() -> dict[str, dict[str, Any]]:
    """Return the applications of bundle.yaml."""
    return yaml.safe_load(deployments.BUNDLE.read_text())["applications"]


def options(text: str, application: str) -> None:
    """Fail unless a configuration in the module's text sets the options of the bundle."""
    for option, value in deployed()[application].get("options", {}).items():
        assert f"{option} = {json.dumps(value)}" in re.sub(" +", " ", text), application


def test_every_application_of_the_bundle_is_in_the_product():
    main = parsed(PRODUCT / "main.tf")
    modules = {name.replace("_", "-") for name in main["module"]}
    assert modules | set(main["locals"]["slurm"]) | {"mysql"} == set(deployed())


def test_the_product_s_slurm_is_the_bundle_s():
    main, variables = parsed(PRODUCT / "main.tf"), inputs(PRODUCT)
    (charm,) = main["resource"]["juju_application"]["slurm"]["charm"]
    assert charm == {
        "name": "${each.key}",
        "base": "${var.base}",
        "channel": "${var.slurm_channel}",
    }
    bundle = deployed()
    for name, text in main["locals"]["slurm"].items():
        body = bundle[name]
        assert body["charm"] == name
        assert body["channel"] == variables["slurm_channel"]["default"]
        assert body["base"] == variables["base"]["default"]
        options(text, name)
        if name != "slurmd":
            assert f"units = {body['num_units']}" in text
    nodes = (PRODUCT / "variables.tf").read_text()
    assert f"units       = optional(number, {bundle['slurmd']['num_units']})" in nodes


def test_the_product_s_database_is_the_bundle_s():
    mysql = parsed(PRODUCT / "main.tf")["resource"]["juju_application"]["mysql"]
    body = deployed()["mysql"]
    (charm,) = mysql["charm"]
    assert charm == {"name": "mysql", "base": body["base"], "channel": body["channel"]}
    text = (PRODUCT / "variables.tf").read_text()
    assert f'{{ profile = "{body["options"]["profile"]}" }}' in text


def test_the_product_s_modules_are_our_charms():
    bundle = deployed()
    for label, module in parsed(PRODUCT / "main.tf")["module"].items():
        name = label.replace("_", "-")
        charm = pathlib.PurePath(bundle[name]["charm"]).stem
        assert module["source"] == f"../charms/{charm}/terraform"
        own = inputs(deployments.ROOT / "charms" / charm / "terraform")
        assert set(module) - {"source", "count"} <= set(own)
        assert module.get("app_name", own["app_name"]["default"]) == name
        options(module.get("config", ""), name)


def test_the_product_integrates_what_the_bundle_relates():
    bundle = yaml.safe_load(deployments.BUNDLE.read_text())
    main = parsed(PRODUCT / "main.tf")
    local = main["locals"]
    defaults = {
        f"${{local.{name}.name}}:${{local.{name}.endpoint}}": _default_end(local[name])
        for name in ("filesystem", "database")
    }
    ends = [[defaults.get(end, end) for end in pair] for pair in local["integrations"].values()]
    assert {frozenset(pair) for pair in ends} == {frozenset(pair) for pair in bundle["relations"]}
    waits = set(main["resource"]["juju_integration"]["all"]["depends_on"])
    modules = {f"${{module.{label}}}" for label in main["module"]}
    assert waits == modules | {"${juju_application.mysql}", "${juju_application.slurm}"}


def _default_end(choice: str) -> str:
    """Return the application and endpoint that a local names where its variable is null."""
    found = re.search(r'name *[:=] *"([^"]+)", *"?endpoint"? *[:=] *"([^"]+)"', choice)
    assert found is not None, choice
    return f"{found[1]}:{found[2]}"
