import pathlib

import jinja2
import pytest

from slurm_ddp import templates


def test_a_file_is_rendered_as_it_stands(tmp_path: pathlib.Path):
    path = tmp_path / "unit.j2"
    path.write_text("# {{ name }}\n{% for bind in binds %}\nbind {{ bind }}\n{% endfor %}\n")
    assert templates.render(path, name="<a> & b", binds=["::1", "127.0.0.1"]) == "# <a> & b\nbind ::1\nbind 127.0.0.1\n"


def test_a_value_that_nobody_gave_is_an_error(tmp_path: pathlib.Path):
    path = tmp_path / "unit.j2"
    path.write_text("{{ name }}\n")
    with pytest.raises(jinja2.UndefinedError, match="name"):
        templates.render(path)
