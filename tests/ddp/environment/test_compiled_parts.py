"""Compiled extensions of packages load with the installed torch, or the build names them."""

import pathlib
import shutil
import sys
import sysconfig

import pytest

from ddp.environment import compiled_parts, uv


@pytest.fixture
def environment(tmp_path: pathlib.Path) -> pathlib.Path:
    """Make an environment with a torch and a torchvision without compiled parts."""
    folder = tmp_path / "env"
    site = folder / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    for name in ("torch", "torchvision"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").touch()
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text(f"home = {pathlib.Path(sys.executable).parent}\n")
    return folder


def site(environment: pathlib.Path) -> pathlib.Path:
    (found,) = environment.glob("lib/python3.*/site-packages")
    return found


def compile_against(library: bytes, target: pathlib.Path) -> None:
    """Write a library that needs `library`, a name as long as the C library's."""
    stdlib = pathlib.Path(str(sysconfig.get_config_var("DESTSHARED")))
    for source in sorted(stdlib.glob("*.so")):
        data = source.read_bytes()
        if b"\0libc.so.6\0" in data:
            target.write_bytes(data.replace(b"\0libc.so.6\0", b"\0" + library + b"\0"))
            return
    pytest.skip("this Python has no compiled modules of its own")


def load(environment: pathlib.Path) -> None:
    parts = compiled_parts.find(environment)
    compiled_parts.check(environment / "bin" / "python", parts, "2.13.0+cpu")


def test_a_part_that_needs_a_library_that_torch_lacks_is_named(environment: pathlib.Path):
    compile_against(b"libc10.so", site(environment) / "torchvision" / "_C.so")
    with pytest.raises(uv.InstallError) as caught:
        load(environment)
    line = "torchvision does not load beside torch 2.13.0+cpu (libc10.so is missing); name in the"
    assert str(caught.value).startswith(line)
    assert "or set torch-index to the index that torch came from" in str(caught.value)


def test_parts_that_load_and_what_lacks_other_libraries_pass(environment: pathlib.Path):
    compile_against(b"libxyz.so", site(environment) / "torchvision" / "video.so")
    with (site(environment) / "torchvision" / "video.so").open("ab") as file:
        file.write(b"libc10.so")  # it names one of torch's
    assert len(compiled_parts.find(environment)) == 1
    load(environment)


def test_libraries_that_do_not_use_torch_are_not_looked_at(environment: pathlib.Path):
    compile_against(b"libxyz.so", site(environment) / "torchvision" / "a.so")
    assert compiled_parts.find(environment) == []


def test_only_packages_of_pytorch_of_another_build_are_replaced(environment: pathlib.Path):
    for name in ("torchvision-0.28.0", "torchaudio-2.13.0+cpu", "timm-1.0", "torch-2.13.0"):
        (site(environment) / f"{name}.dist-info").mkdir()
    assert compiled_parts.of_other_builds(environment, "cpu") == ["torchvision==0.28.0+cpu"]


def test_the_environment_below_is_unpacked_for_the_check(tmp_path: pathlib.Path):
    if shutil.which("zstd") is None:
        pytest.skip("no zstd")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "file").write_text("text")
    archive = tmp_path / "base.tar.zst"
    shutil.make_archive(str(tmp_path / "base"), "tar", tmp_path / "one")
    uv.call("/usr/bin/zstd", "-q", str(tmp_path / "base.tar"), "-o", str(archive))
    compiled_parts.unpack_base(str(archive), str(tmp_path / "there"))
    assert (tmp_path / "there" / "file").read_text() == "text"
