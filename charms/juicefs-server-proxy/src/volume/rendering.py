"""Fill in the templates that lie beside a module."""

import pathlib

import jinja2


def render(module: str, template: str, **values: object) -> str:
    """Fill in a template of the folder `templates` beside a module, whose `__file__` is given."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(module).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - configuration files, not HTML
    )
    return environment.get_template(template).render(**values)
