"""Projects of two users on the login host: torchrun and sbatch commands run unchanged under ddp."""

import base64
import collections.abc
import io
import os
import pathlib
import subprocess
import tarfile
import typing

import pytest

from functional.conftest import Cluster, Json
from functional.test_people import SMALL, Person, person

pytestmark = [pytest.mark.trains, pytest.mark.timeout(1500)]
CWD = {
    "settings.py": "steps = 3",
    "configs/a.txt": "lr: 0.1",
    "train.py": """
import os, pathlib, sys
import torch.distributed as dist
exec(open("settings.py").read())
dist.init_process_group("gloo")
rank = dist.get_rank()
text = pathlib.Path(sys.argv[1]).read_text().strip()
out = pathlib.Path("out")
found = "found out/" if (out / "result-0.txt").exists() else "new"
print(found, "steps", steps, "config", text, "user", os.environ.get("USER"), flush=True)
dist.barrier()
out.mkdir(exist_ok=True)
(out / f"result-{rank}.txt").write_text(text)
dist.destroy_process_group()
""",
}
PACKAGE = {
    "configs/a.yaml": "lr: 0.1",
    "mylib/__init__.py": "SCALE = 2",
    "train/__init__.py": "",
    "train/main.py": """
import pathlib, sys
import torch.distributed as dist
from mylib import SCALE
dist.init_process_group("gloo")
print("OK", dist.get_rank(), SCALE, sys.argv[1:], pathlib.Path("configs/a.yaml").read_text().strip(), flush=True)
dist.destroy_process_group()
""",
    "run.sbatch": "#!/bin/bash\n#SBATCH -N 2\nsrun python -m train.main",
    "nb.ipynb": '{"cells": [], "nbformat": 4}',
}
BUILT = {
    ".gitignore": "_version.py\n/env\n",
    "configs/base.yaml": "lr: 0.1",
    "src/net/__init__.py": "from net._version import V\n",
    "train/main.py": """
import pathlib, sys
from net import V
print("OK", V, pathlib.Path(sys.argv[2]).read_text(), sys.prefix, flush=True)
""",
}
SRC = {
    "pyproject.toml": '[project]\nname = "mynet"\n[build-system]\nrequires = ["setuptools"]\n',
    "scripts/fit.py": "import mynet\nprint('OK', mynet.WIDTH, mynet.__file__)\n",
    "src/mynet/__init__.py": "WIDTH = 8",
}
PEERS = "SLURM_DDP_PEERS"
# nanoGPT's DistributedDataParallel knows GPUs only; the rest of it is as it is
ON_CPUS = """
sed -i "s/device = f'cuda:{ddp_local_rank}'/device = 'cpu'/; /torch.cuda.set_device/d; s/, device_ids=\\[ddp_local_rank\\]//" \
train.py
python3 -c "import array; array.array('H', range(2000)).tofile(open('data/shakespeare_char/train.bin', 'wb'))"
cp data/shakespeare_char/train.bin data/shakespeare_char/val.bin
git init -q && git check-ignore -q data/shakespeare_char/train.bin
"""
TINY = (
    "--device=cpu --backend=gloo --dtype=float32 --compile=False --block_size=16 --batch_size=2 "
    "--n_layer=1 --n_head=1 --n_embd=16 --gradient_accumulation_steps=2 --eval_iters=1 --eval_interval=1 --max_iters=2 "
    "--always_save_checkpoint=True"
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("carol", "2003"), id="carol"),
        pytest.param(("dave", "2004"), id="dave", marks=pytest.mark.long),
    ],
)
def someone(cluster: Cluster, request: pytest.FixtureRequest) -> typing.Iterator[Person]:
    cluster.action("install-environment", timeout=1500)
    with person(cluster, *request.param) as one:
        yield one


def bring(one: Person, files: collections.abc.Mapping[str, str], folder: str) -> None:
    """Write files into the user's folder."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            entry.mtime = 1_700_000_000
            tar.addfile(entry, io.BytesIO(text.encode()))
    text = base64.b64encode(packed.getvalue()).decode()
    one.does(f"mkdir -p '{folder}' && echo {text} | base64 -d | tar -xz -C '{folder}'")


def install_git(cluster: Cluster) -> None:
    """Have git on the login node, without which .gitignore does not count."""
    cluster.exec(
        "sackd/0",
        "sh",
        "-c",
        "command -v git || { apt-get -q update && apt-get -qy install git; }",
        timeout=300,
    )


def log_of(one: Person, folder: str, words: str) -> str:
    """Submit in a folder, wait for the end, and return the job's log."""
    done: Json = one.json(f"cd '{folder}' && ddp submit --json --wait {SMALL} {words}")
    assert done["state"] == "COMPLETED"
    return one.does(f"cat {done['log']}")


def test_relative_files_are_read_and_written_and_found_again(someone: Person):
    folder = "my proj\u00e9kt"  # of any name
    bring(someone, CWD, folder)
    log = log_of(someone, folder, "--run cwd train.py configs/a.txt")
    assert log.count(f"new steps 3 config lr: 0.1 user {someone.name}") == 2
    code = f"{someone.folder}/runs/cwd/code"
    assert someone.does(f"ls {code}/out").split() == ["result-0.txt", "result-1.txt"]
    assert (
        log_of(someone, folder, "--run cwd train.py configs/a.txt").count("found out/ steps 3") == 2
    )
    assert someone.does("ddp fetch cwd --to got && ls got/out").split()[-2:] == [
        "result-0.txt",
        "result-1.txt",
    ]
    assert "exists already" in someone.tries("ddp fetch cwd --to got").err


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("-m train.main", marks=pytest.mark.long),
        "--env PYTHONPATH=. train/main.py",
        pytest.param("torchrun --nproc-per-node 1 -m train.main", marks=pytest.mark.long),
        pytest.param("python -m train.main", marks=pytest.mark.long),
    ],
)
def test_a_package_starts_however_it_is_typed_and_its_arguments_arrive_unchanged(
    someone: Person, words: str
):
    bring(someone, PACKAGE, "package")
    log = log_of(someone, "package", f"""{words} --name "two words" 'x={{"a": [1, 2]}}'""")
    for rank in (0, 1):
        assert f"""OK {rank} 2 ['--name', 'two words', 'x={{"a": [1, 2]}}'] lr: 0.1""" in log


@pytest.mark.long
def test_a_built_module_a_source_folder_a_program_in_place_and_an_active_environment(
    cluster: Cluster, someone: Person
):
    install_git(cluster)
    folder, words = (
        f"{someone.folder}/in place",
        "--env PYTHONPATH=src train/main.py --config configs/base.yaml",
    )
    bring(someone, BUILT, folder)
    someone.does(f"cd '{folder}' && git init -q && git add -A && echo 'V = 7' >src/net/_version.py")
    for how in ("", "--no-snapshot "):
        assert log_of(someone, folder, f"{how}{words}").count("OK 7 lr: 0.1") == 2
    newest = "$(ls -t /mnt/shared/environments/*.tar.zst | head -n 1)"
    someone.does(
        f"mkdir '{folder}/env' && zstd -dc {newest} | tar -xi -C '{folder}/env'", timeout=900
    )
    log = log_of(someone, folder, f"--python '{folder}/env/bin/python' {words}")
    assert log.count(f"OK 7 lr: 0.1 {folder}/env") == 2
    someone.does(f"rm -r '{folder}/env'", timeout=900)


def test_words_that_start_no_program_are_refused_with_the_line_to_type(someone: Person):
    bring(someone, PACKAGE, "package")
    for words, text in {
        "run.sbatch": "write: ddp submit -m train.main",
        "nb.ipynb": "jupyter nbconvert --to script nb.ipynb, then: ddp submit nb.py",
        "mpirun -n 2 python train/main.py": "write: ddp submit train/main.py",
    }.items():
        answer = someone.tries(f"cd package && ddp submit {words}")
        assert answer.code in (1, 2)
        assert text in answer.err.splitlines()[-1]


@pytest.mark.long
def test_a_missing_module_of_the_project_is_named_with_its_path(someone: Person):
    bring(someone, PACKAGE, "package")
    answer = someone.tries(f"cd package && ddp submit --wait {SMALL} train/main.py x")
    assert "package/mylib, which is not on sys.path: --env PYTHONPATH=." in answer.err
    assert "requirements" not in answer.err


@pytest.mark.long
def test_nanogpt_s_own_checkout_trains_and_continues(cluster: Cluster, someone: Person):
    checkout = pathlib.Path(os.environ.get(PEERS, "")).absolute() / "nanoGPT"
    if not os.environ.get(PEERS) or not checkout.is_dir():
        pytest.skip(f"no checkout of nanoGPT; set {PEERS} to the folder that holds one")
    install_git(cluster)
    names = subprocess.run(
        ["git", "-C", checkout, "ls-files"], check=True, capture_output=True, text=True
    ).stdout.split()
    texts = [
        name for name in names if pathlib.PurePath(name).suffix in (".py", ".md", ".gitignore", "")
    ]
    bring(someone, {name: (checkout / name).read_text() for name in texts}, "nanoGPT")
    someone.does(f"cd nanoGPT\n{ON_CPUS}")
    log = log_of(someone, "nanoGPT", f"--run nano train.py config/train_shakespeare_char.py {TINY}")
    assert "saving checkpoint to out-shakespeare-char" in log
    again = log_of(
        someone,
        "nanoGPT",
        f"--run nano train.py config/train_shakespeare_char.py {TINY} --init_from=resume",
    )
    assert "Resuming training from out-shakespeare-char" in again


@pytest.mark.long
def test_a_package_in_src_is_imported_from_the_copy(someone: Person):
    bring(someone, SRC, "layout")
    log = log_of(someone, "layout", "--run layout scripts/fit.py")
    assert log.count(f"OK 8 {someone.folder}/runs/layout/code/src/mynet/__init__.py") == 2
