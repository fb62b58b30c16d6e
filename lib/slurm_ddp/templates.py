"""Configuration and unit files out of a charm's templates."""

import pathlib

import jinja2


def render(path: pathlib.Path, **values: object) -> str:
    """Return a rendered template. What the template names and nobody gave is an error; nothing is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(path.parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - not HTML
    )
    return environment.get_template(path.name).render(**values)
