"""What gpu-health makes of a card's values and of the kernel's lines, without a machine."""

import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest
from smi_samples import BARE, HEALTHY, answer

from gpu import smi, xids
from node import health as gpu_health

pytestmark = pytest.mark.usefixtures("uptime")  # this machine runs for a while


def judged(values: dict[str, str]) -> list[smi.Finding]:
    return gpu_health.judge(*smi.read(answer(values)))


@pytest.mark.parametrize("values", [HEALTHY, BARE, {}], ids=["healthy", "bare", "nothing"])
def test_a_card_that_is_fine_or_does_not_tell(values: dict[str, str]):
    assert judged(values) == []


@pytest.mark.parametrize("path", [*HEALTHY, "ecc_errors/volatile/sram_uncorrectable"])
@pytest.mark.parametrize(
    "value", ["N/A", "[N/A]", "Unknown Error", "[Unknown Error]", "ERR!", "", "Not Supported"]
)
def test_what_is_not_known_is_no_fault(path: str, value: str):
    assert judged(HEALTHY | {path: value}) == []


@pytest.mark.parametrize(
    "rule", [rule for rule in smi.RULES if rule.check != "fabric"], ids=lambda rule: rule.path
)
def test_each_rule_finds_its_bad_value(rule: smi.Rule):
    bad = (
        str(rule.good + 1)
        if isinstance(rule.good, int)
        else {"Not Active": "Active"}.get(rule.good, "Yes")
    )
    (found,) = judged(HEALTHY | {rule.path: bad})
    assert (found.level, found.check, found.gpu) == (rule.level, rule.check, "0000:01:00.0")
    assert found.text == rule.text.replace("{}", bad)


@hypothesis.given(
    st.sampled_from([r for r in smi.RULES if r.good in ("No", "Not Active")]), st.text(max_size=40)
)
def test_a_value_that_is_none_of_the_rules_words_drains_nothing(rule: smi.Rule, value: str):
    card = smi.Card("0000:01:00.0", HEALTHY | {rule.path: value})
    hypothesis.assume(
        value.strip(" \t\r\n[]") not in ("Yes", "Active", "GPU is lost", "GPU requires reset")
    )
    assert all(
        (one.level, one.check) == ("warn", "query") and "\n" not in one.text
        for one in gpu_health.judge(card)
    )


@pytest.mark.parametrize("path", [rule.path for rule in smi.RULES])
@pytest.mark.parametrize("value", ["GPU is lost", "[GPU requires reset]"])
def test_a_card_that_does_not_answer_is_one_fault(path: str, value: str):
    (found,) = judged(HEALTHY | {path: value})
    assert (found.level, found.text.partition(": ")[0]) == ("drain", value.strip("[]"))


@pytest.mark.parametrize(
    ("values", "uptime_s", "found"),
    [
        ({"fabric/state": "In Progress"}, 1000, ["fabric/state In Progress"]),
        ({"fabric/status": "NVML_ERROR_X"}, 1000, ["fabric/status NVML_ERROR_X"]),
        ({"fabric/state": "In Progress"}, 300, []),  # it has five minutes after boot
        ({"fabric/state": "In Progress", "fabric/status": "X"}, 301, ["fabric/state In Progress"]),
    ],
)
def test_the_fabric(uptime: pathlib.Path, values: dict[str, str], uptime_s: int, found: list[str]):
    uptime.write_text(f"{uptime_s}.0 1.0\n")
    texts = [f"{text}: is nvidia-fabricmanager running?" for text in found]
    assert [finding.text for finding in judged(HEALTHY | values)] == texts


@pytest.mark.parametrize(
    ("code", "level"), [(code, level) for code, (level, _) in xids.TABLE.items()]
)
def test_every_xid_of_the_table(code: int, level: str):
    line = f"1763664000.5 vm kernel: NVRM: Xid (PCI:0000:10:1c): {code}, pid=123, name=python, Ch 00000008"
    found = xids.judge(line)
    assert found is not None
    assert (found.level, found.gpu) == (level, "0000:10:1c.0")
    assert found.text.startswith(f"Xid {code}: ")


@pytest.mark.parametrize(
    "code", [8, 13, 31, 37, 43, 44, 45, 66, 68, 69, 93, 121, 137, 141, 152, 153, 157, 160, 999]
)
def test_xids_of_applications_and_unknown_ones_are_nothing(code: int):
    assert xids.judge(f"1.0 vm kernel: NVRM: Xid (PCI:0000:01:00): {code}, pid=79, name=79") is None


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        (
            "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
            "GPU Reset Required",
        ),
        (
            "154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
            "Node Reboot Required",
        ),
        ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", None),
        ("145, RLW_REMAP Nonfatal XC0 i0 Link 00 (0x00000000)", None),
        ("149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6)", "fatal NVLink error"),
    ],
)
def test_xids_whose_text_counts(rest: str, text: str | None):
    found = xids.judge(f"1.0 vm kernel: NVRM: Xid (PCI:0000:01:00): {rest}")
    assert (found.text if found else None) == (f"Xid {rest[:3]}: {text}" if text else None)


@pytest.mark.parametrize("text", ["109", "+x", "+1234", "+-1", "+74 -74", "$(id)"])
def test_what_is_no_list_of_xids(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match=r"^(write \+XID .*, not '|Xid 74 is both)"):
        xids.parse(text)
    with pytest.raises(SystemExit):
        gpu_health.main([f"--xids={text}"])
    assert "--xids: " in capsys.readouterr().err
