"""A rank's load on filesystem and peers stays as in docs/explanation/scale.md."""

# pyright: basic, reportPrivateImportUsage=false
import collections
import json
import os
import pathlib
import time

import pytest
import ranks
import torch.distributed as dist

from ddptrain.world import agreement

TINY = (
    "--layers 1 --heads 2 --width 32 --seq-len 32 --batch 1 --precision fp32 --eval-rows 8 --steps 4 --epoch-steps 2"
).split()
SIZE = 4


@pytest.fixture(scope="module")
def opened(
    dataset: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[pathlib.Path, list[list[str]]]:
    """A training's folder, and the files that each of its ranks opened."""
    folder = tmp_path_factory.mktemp("scale")
    (folder / "opens").mkdir()
    run_dir = folder / "run"
    ranks.trained(
        SIZE,
        dataset,
        run_dir,
        *TINY,
        accident="accident_opens",
        OPENS=str(folder / "opens"),
        RUN_ATTEMPT_ID="1.r0",
    )
    return run_dir, [
        (folder / "opens" / str(rank)).read_text().splitlines() for rank in range(SIZE)
    ]


def test_a_rank_but_the_first_opens_nothing_but_its_own_share_of_the_data(
    opened: tuple[pathlib.Path, list[list[str]]], dataset: pathlib.Path
):
    run_dir, opens = opened
    assert opens[0].count(f"{dataset}/dataset.json") == 1
    for paths in opens[1:]:
        assert not [path for path in paths if path.startswith(str(run_dir))]
        found = collections.Counter(
            path.removeprefix(f"{dataset}/") for path in paths if path.startswith(str(dataset))
        )
        assert found, "the hook saw nothing"
        assert all(name.endswith(".bin") for name in found), found
        assert all(count == 1 for name, count in found.items() if name.startswith("train/")), found
        assert (
            sum(count for name, count in found.items() if name.startswith("val/")) == 2 * 8 // SIZE
        )


def test_a_checkpoint_has_as_many_files_on_any_number_of_ranks(
    opened: tuple[pathlib.Path, list[list[str]]],
):
    last = opened[0] / "latest"
    found = sorted(str(path.relative_to(last)) for path in last.rglob("*") if path.is_file())
    assert found == ["dcp/.metadata", "dcp/__0_0.distcp", "manifest.json"]


def _agree(rank: int, size: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    one = agreement.Peers(rank, size, dist.group.WORLD, timeout_s=60)
    found = [
        one.sum([rank, 0.5]),
        one.gather([rank]),
        one.share([rank + 3]),
        one.collect(f"rank {rank}"),
        one.broadcast(rank + 7),
    ]
    pathlib.Path(folder, str(rank)).write_text(json.dumps(found))
    dist.barrier()


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_agree_on_sums_and_objects(size: int, tmp_path: pathlib.Path):
    processes = [
        ranks.CONTEXT.Process(target=_agree, args=(rank, size, str(tmp_path)))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    for rank in range(size):
        total = [sum(range(size)), 0.5 * size]
        shares = [[one] for one in range(size)] if rank == 0 else []
        gathered = [f"rank {one}" for one in range(size)] if rank == 0 else []
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found == [total, shares, [3], gathered, 7]


def _be_late(rank: int, size: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError) as refused:
            agreement.Peers(rank, size, dist.group.WORLD, timeout_s=1).barrier()
        pathlib.Path(folder, "refused").write_text(str(refused.value))
    else:
        pathlib.Path(folder, "late").touch()
        time.sleep(5)
    os._exit(0)


def test_a_barrier_names_the_rank_that_is_late(tmp_path: pathlib.Path):
    processes = [
        ranks.CONTEXT.Process(target=_be_late, args=(rank, 2, str(tmp_path))) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert "Ranks 1 failed to pass monitoredBarrier" in (tmp_path / "refused").read_text()
