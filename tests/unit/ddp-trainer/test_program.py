"""The charm installs and runs the program: real files, a real process under another account."""

import os
import pathlib
import subprocess
import typing

import everybody
import pytest

import program

REPOSITORY = pathlib.Path(__file__).parents[3]
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root installs for everybody, and becomes others"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> typing.Iterator[pathlib.Path]:
    """The program below a folder that everybody can reach."""
    with everybody.installed(tmp_path_factory.mktemp("program").name) as top:
        yield top


@needs_root
def test_everybody_can_run_it_and_nobody_can_change_it(installed: pathlib.Path):
    argv, env = (program.COMMAND, "--help"), {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, user="nobody", env=env, cwd="/"
    )
    assert (done.returncode, done.stderr, "submit" in done.stdout) == (0, "", True)
    for path in (installed / "lib").rglob("*"):
        about = path.stat()
        assert about.st_uid == 0, path
        assert not about.st_mode & 0o022, path
    assert list((installed / "lib").rglob("*.pyc")), "compiled once, not with each start"


@needs_root
def test_everybodys_python_imports_submit_and_nothing_else_of_it(installed: pathlib.Path):
    (path,) = (installed / "site").iterdir()
    folder = pathlib.Path(path.read_text().strip())
    assert sorted(one.name for one in folder.iterdir()) == ["cloudpickle", "ddptrain"]
    done = subprocess.run(
        [program.PYTHON, "-c", "from ddptrain import submit; import cloudpickle; print(submit)"],
        capture_output=True,
        text=True,
        check=False,
        user="nobody",
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder)},
        cwd="/",
    )
    assert done.stdout.startswith("Submit("), done.stderr


@needs_root
def test_the_charm_asks_it_as_the_submit_user(installed: pathlib.Path):
    wrong = program.ask("nobody", {"do": "check", "config": {"workspace": "x"}, "unit": ""}, print)
    assert wrong.error.startswith("workspace: 'x' is not allowed")


@needs_root
def test_a_program_that_breaks_is_reported_in_its_own_words(
    installed: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    broken = installed / "broken"
    for text, words in (
        ("#!/bin/sh\necho oh no >&2\nexit 3\n", "oh no"),
        ("#!/bin/sh\necho hello\n", "printed 'hello"),
        ("#!/bin/sh\nexec sleep 60\n", "exit status -9"),
    ):
        broken.write_text(text)
        broken.chmod(0o755)
        monkeypatch.setattr(program, "COMMAND", broken)
        with pytest.raises(program.ProgramError, match=words):
            program.ask("nobody", {"do": "check"}, print, timeout_s=0.5)
    broken.unlink()
    with pytest.raises(program.ProgramError, match="No such file"):
        program.ask("nobody", {"do": "check"}, print)


def test_the_program_brings_what_it_needs_and_nothing_else():
    assert {"click", "jinja2", "pydantic", "rich", "pydantic-core", "markupsafe"} <= set(
        program.distributions()
    )
    assert "ops" not in program.distributions()
