"""System errors become one line with the path and the remedy, on every rank, at every place."""

# pyright: basic, reportPrivateImportUsage=false
import errno
import os
import pathlib
import shutil
import typing

import pytest
import ranks

from ddptrain import cli
from ddptrain.checkpoint import stored
from ddptrain.ground import files

TINY = (
    "--layers 1 --heads 1 --width 16 --seq-len 16 --batch 2 --precision fp32 --eval-rows 4 --steps 4 --epoch-steps 2"
).split()
SMALL = ("-b", "1K", "-e", "1K", "-n", 1, "-w", 0)


def refused(size: int, *argv: object, at: str, error: str, mode: str = "wax+") -> ranks.Result:
    """Run while files with `at` in their path cannot be opened to write."""
    return ranks.run(
        size, *argv, accident="accident_os", FAIL_AT=at, FAIL_ERRNO=error, FAIL_MODE=mode
    )


def one_line(result: ranks.Result, *words: str) -> str:
    assert (result.codes[0], all(result.codes)) == (2, True), result.output
    assert "Traceback" not in result.output
    (line,) = result.fatal()
    for word in words:
        assert word in line
    return line


@pytest.mark.parametrize(
    ("where", "number", "remedy"),
    [
        ("{tmp}/run/.", "EACCES", "Permission denied; give user"),
        ("{tmp}/run/.", "EROFS", "mounted read-only"),
        (
            "run/.config",
            "EDQUOT",
            "quota -s, lfs quota or juicefs quota show it): make room: remove runs",
        ),
        ("run/metrics.jsonl", "EACCES", "Permission denied; give user"),
        ("epoch-0001.tmp-local/dcp/__0_0.distcp", "EROFS", "mounted read-only"),
        ("epoch-0001.tmp-local/dcp/__0_0.distcp", "ENOSPC", "make room: remove runs"),
        ("run/.summary.json", "EIO", "look at the filesystem"),
        ("{tmp}/report/.", "EACCES", "--report-json"),
    ],
)
def test_train_tells_what_it_could_not_write(
    dataset: pathlib.Path, tmp_path: pathlib.Path, where: str, number: str, remedy: str
):
    argv = (
        "train --data",
        dataset,
        "--run-dir",
        tmp_path / "run",
        "--report-json",
        tmp_path / "report" / "r.json",
    )
    result = refused(2, *argv, *TINY, at=where.format(tmp=tmp_path), error=number)
    one_line(result, os.strerror(getattr(errno, number)), remedy, str(tmp_path))
    assert bool(result.marked("DATA")) == ("{tmp}" not in where), (
        "a folder is tried before any work"
    )


@pytest.mark.parametrize(
    ("name", "may_work"),
    [("EDQUOT", False), ("ENOSPC", False), ("EMFILE", False), ("EIO", True), ("ENOENT", True)],
)
def test_errors_that_would_return_are_not_tried_again(name: str, may_work: bool):
    number = getattr(errno, name)
    assert files.describe(OSError(number, os.strerror(number), "x"))[1] == may_work


def test_a_full_disk_leaves_the_checkpoint_before_whole(
    dataset: pathlib.Path, tmp_path: pathlib.Path
):
    run = ("train --data", dataset, "--run-dir", tmp_path / "run", *TINY)
    result = refused(2, *run, at="epoch-0002.tmp-local/", error="ENOSPC")
    one_line(result, "a checkpoint could not be written", "No space left on device; make room")
    assert (tmp_path / "run" / "latest").readlink().name == "epoch-0001"
    assert not list((tmp_path / "run").glob("epoch-0002*"))
    assert stored.verify(tmp_path / "run" / "epoch-0001").step == 2
    ranks.succeed(2, *run)


@pytest.mark.parametrize(
    ("argv", "where"),
    [
        (("smoke", "--run-dir", "{tmp}/run"), "{tmp}/run/."),
        (("smoke", "--report-json", "{tmp}/out/r.json"), "{tmp}/out/."),
        (("collectives", *SMALL, "--json", "{tmp}/out/r.json"), "{tmp}/out/."),
        (("collectives", *SMALL, "--run-dir", "{tmp}/run"), "{tmp}/run/."),
    ],
)
def test_where_the_result_will_go_is_tried_first(
    tmp_path: pathlib.Path, argv: tuple[object, ...], where: str
):
    given = [str(word).format(tmp=tmp_path) for word in argv]
    result = refused(2, *given, at=where.format(tmp=tmp_path), error="EROFS")
    one_line(result, given[-2], "cannot be written", "mounted read-only")
    assert not result.marked("RESULT")


@pytest.mark.parametrize("where", ["out/.", "shard-", "part-", ".dataset.json"])
def test_prepare_tells_what_it_could_not_write(
    text_dir: pathlib.Path, tmp_path: pathlib.Path, where: str
):
    argv = (
        "prepare",
        "--source",
        text_dir,
        "--output",
        tmp_path / "out",
        "--tokenizer",
        "byte",
        "--workers",
        1,
    )
    result = refused(1, *argv, at=where, error="ENOSPC")
    one_line(result, "No space left on device", "make room", str(tmp_path / "out"))
    assert bool(result.marked("DATA")) == (where != "out/.")


def test_prepare_with_workers_ends_at_the_first_that_cannot_write(
    text_dir: pathlib.Path, tmp_path: pathlib.Path
):
    argv = (
        "prepare",
        "--source",
        text_dir,
        "--output",
        tmp_path / "out",
        "--tokenizer",
        "byte",
        "--part-mib",
        0.03,
    )
    result = ranks.run(1, *argv, "--workers 2", accident="accident_small_files")
    one_line(result, "File too large", "ulimit -f", str(tmp_path / "out"))


def test_a_source_folder_that_cannot_be_read_is_not_passed_over(
    text_dir: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    shutil.copytree(text_dir, tmp_path / "text" / "more")
    (tmp_path / "text" / "here.txt").write_text("some text")
    listed = os.scandir

    def denied(path: str) -> typing.Any:
        if str(path).endswith("more"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", denied)
    code = cli.main(
        ["prepare", "--source", str(tmp_path / "text"), "--output", str(tmp_path / "out")]
    )
    assert code == 2
    assert f"[FATAL] {tmp_path}/text/more: Permission denied; give user" in capsys.readouterr().out


def test_paths_with_a_file_for_a_folder(text_dir: pathlib.Path, tmp_path: pathlib.Path):
    (tmp_path / "file").touch()
    bad = tmp_path / "file" / "run"
    for size, argv in [
        (2, ("smoke --run-dir", bad)),
        (1, ("prepare --source", text_dir, "--output", bad)),
    ]:
        one_line(ranks.run(size, *argv), str(bad), "Not a directory", "a file stands for a folder")
    one_line(ranks.run(2, "smoke --report-json", tmp_path), "is a folder; give the name of a file")


def test_inspect_tells_what_it_cannot_read(dataset: pathlib.Path, tmp_path: pathlib.Path):
    shutil.copytree(dataset, tmp_path / "d")
    assert refused(1, "inspect", tmp_path / "d", at="nothing", error="EIO", mode="r").codes == [0]
    result = refused(1, "inspect", tmp_path / "d", at="dataset.json", error="EIO", mode="r")
    assert result.codes == [1]
    assert "dataset.json cannot be read" in result.fatal()[0]
    result = refused(
        1, "inspect", tmp_path / "d", at="train/shard-00000.bin", error="EIO", mode="r"
    )
    assert result.codes == [1]
    assert result.fatal()[0].startswith(f"shard {tmp_path}/d/train/shard-00000.bin")
    assert "Input/output error" in result.fatal()[0]


def test_a_write_that_the_system_refuses_without_a_name_gets_one(tmp_path: pathlib.Path):
    with pytest.raises(OSError, match="No space left") as refused, files.naming(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert files.explain(refused.value).startswith(
        f"{tmp_path / 'x'}: No space left on device; make room"
    )
