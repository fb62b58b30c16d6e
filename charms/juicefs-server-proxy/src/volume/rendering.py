"""Fill in the templates of configuration files and units."""

import pathlib

import jinja2


def render(folder: pathlib.Path, template: str, **values: object) -> str:
    """Fill in a template of a folder; a value that is missing is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - configuration files, not HTML
    )
    return environment.get_template(template).render(**values)
