"""The program's settings: sources, precedence, and the report of a mistake."""

import os
import pathlib
import pwd

import pytest

from ddp.options import config
from ddp.problem import ParameterError


@pytest.fixture(autouse=True)
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Replace /etc and the home by folders of the test's."""
    for name in list(os.environ):
        if name.startswith(config.PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.setattr(config, "SYSTEM", tmp_path / "etc" / "slurm-ddp.toml")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config.SYSTEM.parent.mkdir()
    user_file(tmp_path / "home").parent.mkdir(parents=True)
    return tmp_path / "home"


def user_file(home: pathlib.Path) -> pathlib.Path:
    return home / config.USER


def refusal(flags: dict[str, object] | None = None) -> str:
    with pytest.raises(ParameterError) as caught:
        config.load(flags)
    line = str(caught.value)
    assert line.isprintable(), "one line"
    return line


def test_without_any_source_the_defaults_count(home: pathlib.Path):
    assert config.load() == config.Config()
    assert config.settings(config.load()).workspace.path == pathlib.Path(
        pwd.getpwuid(os.geteuid()).pw_dir, "slurm-ddp"
    )


def test_each_source_goes_before_the_last(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    config.SYSTEM.write_text(
        'workspace = "/mnt/etc"\naccount = "ubuntu"\ntorch-build = "cuda"\ntensorboard = true\ntransformers = true\n'
    )
    assert config.load().workspace == "/mnt/etc"
    user_file(home).write_text(
        'workspace = "/mnt/home"\ntorch-build = "cpu"\ntransformers = false\n'
    )
    assert config.load().workspace == "/mnt/home"
    monkeypatch.setenv("DDP_WORKSPACE", "/mnt/variable")
    monkeypatch.setenv("DDP_TORCH_BUILD", "auto")
    assert config.load({"workspace": None}).workspace == "/mnt/variable", (
        "a flag that is not given changes nothing"
    )
    found = config.load({"workspace": "/mnt/flag"})
    assert found.workspace == "/mnt/flag"
    assert (found.account, found.torch_build, found.tensorboard, found.transformers) == (
        "ubuntu",
        "auto",
        True,
        False,
    )


@pytest.mark.parametrize(
    ("text", "meant"),
    [("true", True), ("True", True), ("1", True), ("false", False), ("0", False), ("", False)],
)
def test_a_variable_is_true_or_false(monkeypatch: pytest.MonkeyPatch, text: str, meant: bool):
    config.SYSTEM.write_text(f"tensorboard = {str(not meant).lower()}\n")
    monkeypatch.setenv("DDP_TENSORBOARD", text)
    assert config.load().tensorboard is meant


@pytest.mark.parametrize("where", ["etc", "home"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workspace = ", "Invalid value (at "),
        ('worksapce = "/mnt"', "worksapce: unknown option; there are: accept-oci-risk, account, "),
        ("workspace = 3", "workspace: '3' is not allowed; an absolute path"),
        ('tensorboard = "yes"', "tensorboard: 'yes' is not allowed; true or false"),
        ('torch-build = "rocm"', "torch-build: 'rocm' is not allowed; one of: auto, cpu, cuda"),
    ],
)
def test_a_mistake_in_a_file_names_the_file(home: pathlib.Path, where: str, text: str, words: str):
    path = config.SYSTEM if where == "etc" else user_file(home)
    path.write_text(text)
    assert refusal().startswith(f"{path}: {words}")


def test_a_file_that_cannot_be_read_is_named(home: pathlib.Path):
    user_file(home).write_bytes(b'workspace = "\xff"\n')
    assert refusal().startswith(f"{user_file(home)}: 'utf-8' codec can't decode")
    user_file(home).unlink()
    user_file(home).mkdir()
    assert refusal().startswith(f"{user_file(home)}: ")


def test_a_mistake_is_looked_for_where_the_value_comes_from(
    home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    config.SYSTEM.write_text('workspace = "x"\n')
    assert refusal().startswith(f"{config.SYSTEM}: workspace: 'x'")
    monkeypatch.setenv("DDP_WORKSPACE", "y")
    assert refusal().startswith("$DDP_WORKSPACE: workspace: 'y'")
    assert refusal({"workspace": "z"}).startswith("--workspace: workspace: 'z'")
    assert config.load({"workspace": "/mnt"}).workspace == "/mnt", (
        "what is replaced is not looked at"
    )


def test_the_charms_file_reads_back():
    given: dict[str, str | bool] = {
        "workspace": "/mnt/shared",
        "node-cache": "/scratch",
        "account": "ubuntu",
        "unit": "trainer/0",
        "torch-build": "cpu",
        "torch-version": "2.15.0",
        "torch-index": "https://example.org/simple",
        "mlflow-tracking-uri": "/mnt/shared/mlruns",
        "tensorboard": True,
        "wandb": True,
        "transformers": False,
        "accept-oci-risk": False,
        "contact": "hpc@example.org",
    }
    assert set(given) == {str(field.alias) for field in config.Config.model_fields.values()}
    config.SYSTEM.write_text(config.write(given))
    assert config.load().model_dump(by_alias=True) == given


def test_an_account_that_the_host_does_not_know(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    line = (
        "account: uid 54321 has none on this host; is the directory of accounts (LDAP, sssd) up? "
    )
    with pytest.raises(ParameterError) as caught:
        config.settings(config.load())
    assert str(caught.value) == line + "see: getent passwd 54321"


def test_the_settings_are_those_of_this_account(monkeypatch: pytest.MonkeyPatch):
    found = config.settings(config.load({"workspace": "/mnt/shared/"}))
    assert (found.workspace.path, found.workspace.uid, found.takes_any_script) == (
        pathlib.Path("/mnt/shared"),
        os.geteuid(),
        True,
    )
    assert found.workspace.user == pwd.getpwuid(os.geteuid()).pw_name
    assert (found.payload / "ddptrain").is_dir()
