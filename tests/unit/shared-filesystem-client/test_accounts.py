"""nftables rules between accounts: written, loaded, removed. Their effect: tests/functional."""

import pathlib
import re

import pytest

import accounts
import mount_plan
from machine import Machine
from slurm_ddp.commands import CommandError, Completed

UNIT = "separate-accounts-client-a.service"


class Nft:
    """nft, which knows the tables that it was given."""

    def __init__(self) -> None:
        self.tables: dict[str, str] = {}
        self.loads = 0
        self.error = ""

    def __call__(self, words: tuple[str, ...], _: str | None) -> "str | Completed":
        match words:
            case ("-f", path):
                if self.error:
                    return Completed(1, "", self.error)
                rules = pathlib.Path(path).read_text()
                self.loads += 1
                (name,) = set(re.findall(r"^(?:delete )?table inet (\w+)", rules, re.MULTILINE))
                self.tables[name] = rules
            case ("list", "table", "inet", name):
                return Completed(0 if name in self.tables else 1, "", "")
            case ("delete", "table", "inet", name):
                self.tables.pop(name, None)
            case _:
                raise AssertionError(f"nft {words}")
        return ""


@pytest.fixture
def nft() -> Nft:
    return Nft()


@pytest.fixture
def machine(nft: Nft, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(answers={"nft": nft})
    machine.take_over(monkeypatch, [accounts], tmp_path / "units")
    monkeypatch.setattr(mount_plan, "ETC", tmp_path / "etc")
    return machine


def test_the_rules_are_loaded_once_and_from_each_boot_on(machine: Machine, nft: Nft):
    for _ in range(2):
        accounts.ensure("client-a", "10.0.0.0/8 fd00::/8")
    assert (nft.loads, list(nft.tables), "nftables" in machine.packages) == (
        1,
        ["slurm_ddp_client_a"],
        True,
    )
    assert UNIT in machine.enabled
    assert "elements = { 10.0.0.0/8 }" in nft.tables["slurm_ddp_client_a"]
    assert "elements = { fd00::/8 }" in nft.tables["slurm_ddp_client_a"]
    accounts.ensure("client-a", "192.168.0.0/16")
    assert "10.0.0.0/8" not in nft.tables["slurm_ddp_client_a"]
    assert "ip6 daddr" not in nft.tables["slurm_ddp_client_a"]


def test_rules_that_someone_flushed_are_loaded_again(machine: Machine, nft: Nft):
    accounts.ensure("client-a", "10.0.0.0/8")
    nft.tables.clear()
    accounts.ensure("client-a", "10.0.0.0/8")
    assert (nft.loads, list(nft.tables)) == (2, ["slurm_ddp_client_a"])


def test_without_networks_nothing_is_left_and_nothing_installed(
    machine: Machine, nft: Nft, tmp_path: pathlib.Path
):
    accounts.ensure("client-a", "")
    assert machine.calls == []
    accounts.ensure("client-a", "10.0.0.0/8")
    accounts.ensure("client-b", "10.0.0.0/8")
    accounts.ensure("client-a", "")
    accounts.remove("client-a")
    assert list(nft.tables) == ["slurm_ddp_client_b"], "another application's stay"
    assert machine.enabled == {UNIT.replace("-a.", "-b.")}
    assert not (tmp_path / "etc/client-a/accounts.nft").exists()


def test_every_bit_of_a_uid_is_written_read_and_compared(machine: Machine, nft: Nft):
    accounts.ensure("client-a", "10.0.0.0/8")
    rules = nft.tables["slurm_ddp_client_a"]
    for number in range(32):
        bit = f"{1 << number:#x}"
        assert rules.count(f"meta skuid & {bit} == {bit} tcp ackseq set tcp ackseq | {bit}\n") == 1
        assert rules.count(f"tcp ackseq & {bit} == {bit} ct mark set ct mark | {bit}\n") == 1
        assert rules.count(f"meta skuid & {bit} == {bit} ct mark & {bit} == 0 goto refuse\n") == 1
        assert rules.count(f"meta skuid & {bit} == 0 ct mark & {bit} == {bit} goto refuse\n") == 1


def test_a_kernel_without_them_is_an_error(machine: Machine, nft: Nft):
    nft.error = "Error: Could not process rule: Operation not supported"
    with pytest.raises(CommandError, match="not supported"):
        accounts.ensure("client-a", "10.0.0.0/8")
    nft.error = ""
    accounts.ensure("client-a", "10.0.0.0/8")
    assert nft.loads == 1, "it is tried again"


@pytest.mark.parametrize("text", ["", "10.0.0.0/8", "10.0.0.0/8  10.1.0.0/16 fd00::/8", "10.2.3.4"])
def test_networks_are_taken(text: str):
    accounts.check(text)


@pytest.mark.parametrize(
    "text", ["yes", "10.0.0.0/33", "10.0.0.1/8", "10.0.0.0/8,fd00::/8", "$(id)"]
)
def test_other_words_are_refused_by_the_options_name(text: str):
    with pytest.raises(ValueError, match=r"^separate-accounts: "):
        accounts.check(text)
