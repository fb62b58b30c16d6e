"""Write docs/reference/charms/ from each charm's charmcraft.yaml; `tox -e reference` runs it."""

import collections.abc
import pathlib
from typing import Any, cast

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference" / "charms"


def charms() -> list[pathlib.Path]:
    """Return every charm's charmcraft.yaml."""
    return sorted((ROOT / "charms").glob("*/charmcraft.yaml"))


def page(source: pathlib.Path) -> pathlib.Path:
    """Return the path of a charm's page."""
    return PAGES / f"{source.parent.name}.md"


def render(source: pathlib.Path) -> str:
    """Return the reference page of the charm that `source` declares, in Markdown."""
    charm: dict[str, Any] = yaml.safe_load(source.read_text())
    kind = "Subordinate charm" if charm.get("subordinate") else "Charm"
    bases = ", ".join(name.partition(":")[0] for name in charm["platforms"])
    lines = [
        f"<!-- Written by scripts/reference.py from charms/{source.parent.name}/charmcraft.yaml: change that one. -->",
        f"# {charm['name']}",
        "",
        charm["summary"].strip(),
        "",
        charm["description"].strip(),
        "",
        f"{kind}; {bases}; {', '.join(map(str, charm.get('assumes', [])))}.",
        *_endpoints(charm),
        *_options(charm.get("config", {}).get("options", {})),
        *_actions(charm.get("actions", {})),
        *_named("Resources", charm.get("resources", {})),
        *_named("Storage", charm.get("storage", {})),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _endpoints(charm: dict[str, Any]) -> collections.abc.Iterator[str]:
    rows: list[list[str]] = []
    for role in ("provides", "requires", "peers"):
        for name, spec in charm.get(role, {}).items():
            notes = [f"limit {spec['limit']}"] if "limit" in spec else []
            notes += ["same machine"] if spec.get("scope") == "container" else []
            notes += ["must be related"] if spec.get("optional") is False else []
            text = cell(spec.get("description", ""))
            rows.append([f"`{name}`", role, f"`{spec['interface']}`", "; ".join(notes), text])
    yield from table("Endpoints", ["endpoint", "role", "interface", "notes", "what for"], rows)


def _options(options: dict[str, Any]) -> collections.abc.Iterator[str]:
    rows = [
        [f"`{name}`", spec["type"], _default(spec), cell(spec.get("description", ""))]
        for name, spec in options.items()
    ]
    yield from table("Options", ["option", "type", "default", "meaning"], rows)


def _actions(actions: dict[str, Any]) -> collections.abc.Iterator[str]:
    if actions:
        yield from ("", "## Actions")
    for name, spec in actions.items():
        yield from ("", f"### {name}", "", spec.get("description", "").strip())
        required = set(spec.get("required", []))
        rows: list[list[str]] = []
        for parameter, schema in spec.get("params", {}).items():
            default = "required" if parameter in required else _default(schema)
            rows.append(
                [f"`{parameter}`", _kind(schema), default, cell(schema.get("description", ""))]
            )
        yield from table("", ["parameter", "type", "default", "meaning"], rows)


def _kind(schema: dict[str, Any]) -> str:
    declared = schema.get("type", "")
    kind = (
        " or ".join(map(str, cast("list[object]", declared)))
        if isinstance(declared, list)
        else str(declared)
    )
    if "enum" in schema:
        return f"{kind}: " + ", ".join(f"`{value}`" for value in schema["enum"])
    if "minimum" in schema and "maximum" in schema:
        return f"{kind}, {schema['minimum']} to {schema['maximum']}"
    return kind + (f", at least {schema['minimum']}" if "minimum" in schema else "")


def _named(title: str, things: dict[str, Any]) -> collections.abc.Iterator[str]:
    rows = [
        [f"`{name}`", spec.get("type", ""), cell(spec.get("description", ""))]
        for name, spec in things.items()
    ]
    yield from table(title, ["name", "type", "what for"], rows)


def table(title: str, header: list[str], rows: list[list[str]]) -> collections.abc.Iterator[str]:
    """Yield the lines of a table under its title; nothing without rows."""
    if not rows:
        return
    if title:
        yield from ("", f"## {title}")
    yield from ("", _row(header), _row(["---"] * len(header)))
    yield from (_row(row) for row in rows)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def cell(text: str) -> str:
    """Return a text as a cell of a table has it."""
    return " ".join(text.split()).replace("|", "\\|")


def _default(spec: dict[str, Any]) -> str:
    value = spec.get("default")
    if value is None:
        return ""
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{shown}`" if shown else "empty"


if __name__ == "__main__":
    for old in set(PAGES.glob("*.md")) - {page(source) for source in charms()}:
        old.unlink()
    for charm_source in charms():
        page(charm_source).write_text(render(charm_source))
