"""The user's own Python: typed, named, or loaded by a module; used, or refused by name."""

import os
import pathlib
import shlex

import pytest

from ddp.options import fields, models
from ddp.problem import ParameterError
from ddp.settings import Settings
from ddp.submit import own_python


@pytest.fixture
def modules(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Load a Python and a torch from separate prefixes, as a site's modules do."""
    apps = settings.workspace.path / "apps"
    (apps / "Python/3.11/bin").mkdir(parents=True)
    python = apps / "Python/3.11/bin/python"
    python.symlink_to("/usr/bin/python3")
    site = apps / "PyTorch/2.5/lib/python3/site-packages"
    (site / "torch").mkdir(parents=True)
    (site / "torch/version.py").write_text("__version__ = '2.5.1'\n")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setenv("PATH", f"{python.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("LOADEDMODULES", "Python/3.11:PyTorch/2.5")
    return {"python": str(python), "site": str(site)}


def choose(settings: Settings, **given: object) -> tuple[str, str]:
    params = fields.parse(models.SubmitDdp, {"workload": "/x.py", **given})
    return own_python.choose(settings.workspace, params, is_anywhere=True)


def test_the_python_of_modules_is_named_with_the_line_that_chooses_it(
    settings: Settings, modules: dict[str, str]
):
    python, remark = choose(settings)
    assert python == ""
    assert remark.startswith(f"python: {modules['python']} with torch 2.5.1 of the modules")
    assert remark.endswith(f"to choose it: --python {modules['python']} --env PYTHONPATH")


def test_with_that_line_torch_is_found_in_the_variable(settings: Settings, modules: dict[str, str]):
    variable = shlex.quote(f"PYTHONPATH={modules['site']}")
    found = choose(settings, python=modules["python"], env=variable)
    assert found == (modules["python"], f"python: {modules['python']}, torch 2.5.1")


def test_modules_without_torch_get_no_remark(
    settings: Settings, modules: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PYTHONPATH")
    assert choose(settings) == ("", "")


def test_a_python_without_torch_is_refused(settings: Settings, modules: dict[str, str]):
    with pytest.raises(ParameterError, match="has no torch; give the path of an environment"):
        choose(settings, python=modules["python"])


@pytest.mark.parametrize("is_relative", [True, False])
def test_a_torch_built_from_source_is_found_by_its_pth_file(
    settings: Settings, modules: dict[str, str], *, is_relative: bool
):
    python = pathlib.Path(modules["python"])
    packages = python.parents[1] / "lib/python3/site-packages"
    packages.mkdir(parents=True)
    line = os.path.relpath(modules["site"], packages) if is_relative else modules["site"]
    (packages / "easy-install.pth").write_text(f"# a comment\nimport sys\n\n{line}\n")
    found = choose(settings, python=modules["python"])
    assert found == (modules["python"], f"python: {python}, torch 2.5.1")


@pytest.mark.parametrize(
    ("workload", "wanted"),
    [
        ("/opt/x/bin/python3.11", "/opt/x/bin/python3.11"),
        (".venv/bin/python", ".venv/bin/python"),
        ("python", ""),
        ("bin/train.py", ""),
        ("/opt/x/bin/torchrun", ""),
        (None, ""),
    ],
)
def test_only_a_path_names_a_python(workload: object, wanted: str):
    assert own_python.typed(workload) == wanted
