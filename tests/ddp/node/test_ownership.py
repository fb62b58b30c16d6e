"""Files as an attacker could leave them, and the attack itself, by accounts with only a number."""

import os
import pathlib
import stat

import pytest

from ddp.node import ownership

ME = os.getuid()
TRUSTED = frozenset({0, ME})
STRANGER = 54321

needs_root = pytest.mark.skipif(ME != 0, reason="only root can give files to another account")


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a workspace as it should be, with an archive in it."""
    archive = tmp_path / "shared" / "environments" / "a.tar.zst"
    archive.parent.mkdir(parents=True)
    archive.write_text("good")
    for path, mode in ((archive, 0o644), (archive.parent, 0o755), (archive.parent.parent, 0o1777)):
        path.chmod(mode)
    return archive


def read(path: pathlib.Path, trusted: frozenset[int] = TRUSTED) -> str:
    with os.fdopen(ownership.open_trusted(str(path), trusted)) as file:
        return file.read()


def descriptors() -> int:
    return len(list(pathlib.Path("/proc/self/fd").iterdir()))


def refusal(path: pathlib.Path, trusted: frozenset[int] = TRUSTED) -> str:
    before = descriptors()
    with pytest.raises(ownership.UntrustedError) as caught:
        ownership.open_trusted(str(path), trusted)
    assert descriptors() == before, "a descriptor was left open"
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o2775])
def test_a_folder_that_others_can_write_is_named_with_what_to_type(place: pathlib.Path, mode: int):
    folder = place.parent.parent
    folder.chmod(mode)
    message = refusal(place)
    assert message.startswith(
        f"{folder} has mode {mode:04o} without the sticky bit"
    ) and message.endswith(f"chmod +t {folder}")
    assert ("any account" in message) == bool(mode & stat.S_IWOTH)
    with pytest.raises(ownership.UntrustedError, match=f"mode {mode:04o}"):
        ownership.check_folder(str(folder), TRUSTED)
    folder.chmod(mode | stat.S_ISVTX)
    assert read(place) == "good"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_can_write_is_refused_even_in_a_good_folder(
    place: pathlib.Path, mode: int
):
    place.chmod(mode)
    assert (
        refusal(place) == f"{place} has mode {mode:04o}, so others can write it: chmod go-w {place}"
    )


@needs_root
@pytest.mark.parametrize("depth", [0, 1, 2], ids=["file", "folder", "sticky root"])
def test_whoever_owns_a_component_is_trusted(place: pathlib.Path, depth: int):
    stolen = [place, *place.parents][depth]
    os.chown(stolen, STRANGER, -1)
    message = refusal(place)
    assert message.startswith(f"{stolen} belongs to uid {STRANGER} (mode ")
    assert read(place, TRUSTED | {STRANGER}) == "good"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_links_are_refused_wherever_they_stand(place: pathlib.Path, depth: int):
    real = [place, *place.parents][depth]
    aside = real.with_name("aside")
    real.rename(aside)
    real.symlink_to(aside)
    assert (
        refusal(place) == f"{real} is a symbolic link: use the path that it leads to, or remove it"
    )


def test_special_files_are_refused_at_once(place: pathlib.Path):
    fifo = place.with_name("fifo")
    os.mkfifo(fifo, 0o644)
    assert (
        refusal(fifo) == f"{fifo} is not a regular file: remove it"
    )  # and it does not wait for a writer
    assert refusal(place.parent) == f"{place.parent} is not a regular file: remove it"


@pytest.mark.parametrize("path", ["a.tar.zst", "/tmp/../etc/passwd", "/etc/./passwd", ""])
def test_only_absolute_paths_that_lead_where_they_say(path: str):
    with pytest.raises(ownership.UntrustedError, match="absolute path"):
        ownership.open_trusted(path, TRUSTED)


def test_a_missing_file_is_an_oserror_that_names_it(place: pathlib.Path):
    for path, missing in (
        (place.with_name("b"), place.with_name("b")),
        (place.parent / "c" / "d", place.parent / "c"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            ownership.open_trusted(str(path), TRUSTED)
        assert caught.value.filename == str(missing)
    with pytest.raises(NotADirectoryError):
        ownership.open_trusted(f"{place}/x", TRUSTED)


def test_the_checked_file_stays_the_opened_one(place: pathlib.Path):
    for folder in (str(place.parent), "/"):
        ownership.check_folder(folder, TRUSTED)
    file = ownership.open_trusted(str(place), TRUSTED)
    place.rename(place.with_name("old"))
    place.write_text("bad")
    with os.fdopen(file) as opened:
        assert opened.read() == "good"


@needs_root
def test_folders_that_may_be_searched_only_are_passed(place: pathlib.Path):
    """As another account in a child, since root may read everything."""
    for path in list(place.parents)[:-1]:
        path.chmod(path.stat().st_mode | 0o011)
    place.parent.parent.chmod(0o711)
    place.parent.chmod(0o711)
    assert as_stranger(lambda: os.close(ownership.open_trusted(str(place), TRUSTED)))


@needs_root
def test_a_stranger_steals_from_an_open_root_and_not_from_a_sticky_one(place: pathlib.Path):
    """The attack behind the check, by another uid: a folder that passed cannot be replaced."""
    environments = place.parent
    for path in list(environments.parents)[1:-1]:
        path.chmod(path.stat().st_mode | 0o011)

    def steal() -> None:
        environments.rename(environments.with_name("stolen"))
        environments.mkdir()
        place.write_text("bad")

    assert not as_stranger(steal)
    assert read(place) == "good"
    environments.parent.chmod(0o777)
    assert as_stranger(steal), "the attack does not work where nothing stops it"
    assert "without the sticky bit" in refusal(place)
    environments.parent.chmod(0o1777)
    assert refusal(place).startswith(f"{environments} belongs to uid {STRANGER}")


def as_stranger(act: object) -> bool:
    """Run a function as another uid in a child; return whether it succeeded."""
    assert callable(act)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            act()
            code = 0
        except PermissionError:
            pass
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
