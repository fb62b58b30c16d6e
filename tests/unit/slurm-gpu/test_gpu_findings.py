"""What gpu-health makes of a card's values and of the kernel's lines, without a machine."""

import pathlib
import re

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
@pytest.mark.parametrize("value", ["N/A", "[N/A]", "", "Not Supported", "[Not Supported]"])
def test_values_that_a_card_does_not_report_are_not_faults(path: str, value: str):
    assert judged(HEALTHY | {path: value}) == []


@pytest.mark.parametrize("path", [rule.path for rule in smi.RULES])
@pytest.mark.parametrize(
    "value", ["Unknown Error", "[Unknown Error]", "ERR!", "[Insufficient Permissions]"]
)
def test_an_answer_that_is_an_error_is_a_warning_with_its_text(path: str, value: str):
    (found,) = judged(HEALTHY | {path: value})
    assert (found.level, found.check, found.gpu) == ("warn", "query", "0000:01:00.0")
    assert found.text == f"{path} cannot be read: {value.strip('[]')!r}"


def test_an_error_in_place_of_a_group_of_values_is_one_warning():
    without_rows = {path: value for path, value in HEALTHY.items() if "remapped" not in path}
    (found,) = judged(without_rows | {"remapped_rows": "Unknown Error"})
    assert found.level == "warn"
    assert found.text.endswith("cannot be read: 'Unknown Error' (as 1 more values)")


@pytest.mark.parametrize(
    "rule", [rule for rule in smi.RULES if rule.check != "fabric"], ids=lambda rule: rule.path
)
def test_each_rule_finds_its_bad_value(rule: smi.Rule):
    bad = str(rule.good + 1) if isinstance(rule.good, int) else rule.bad[0]
    (found,) = judged(HEALTHY | {rule.path: bad})
    assert (found.level, found.check, found.gpu) == (rule.level, rule.check, "0000:01:00.0")
    assert found.text == rule.text.replace("{}", bad)


WORDS = [rule for rule in smi.RULES if isinstance(rule.good, str)]
DOCUMENTED = {word for rule in WORDS for word in (rule.good, *rule.bad)}
ERRORS = ("Unknown Error", "ERR!", "Insufficient Permissions")
LOST = tuple(smi.LOST_CARDS)
values_of_any_kind = st.one_of(
    st.sampled_from(sorted({*DOCUMENTED, *smi.NOT_REPORTED, *ERRORS, *LOST})),
    st.text(max_size=40),
    st.integers(0, 10**30).map(str),
)


def expected_levels(values: dict[str, str]) -> set[tuple[str, str]]:
    """Return level and check of each finding, from the documentation's words alone."""
    if any(value in LOST for value in values.values()):
        return {("drain", "query")}
    is_joining = values["fabric/state"] in ("Not Started", "In Progress")
    found: set[tuple[str, str]] = set()
    for rule in smi.RULES:
        value = values[rule.path]
        if value in smi.NOT_REPORTED or (is_joining and rule.path == "fabric/status"):
            continue
        if isinstance(rule.good, int):
            is_known = bool(re.fullmatch("[0-9]{1,18}", value))
            is_good = is_known and int(value) <= rule.good
        else:
            is_known = value in (rule.good, *rule.bad)
            is_good = value == rule.good
        if not is_known:
            found.add(("warn", "query"))
        elif not is_good:
            found.add((rule.level, rule.check))
    return found


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.fixed_dictionaries({rule.path: values_of_any_kind for rule in smi.RULES}))
def test_the_verdict_on_every_combination_of_words(values: dict[str, str]):
    values = {path: value.strip(" \t\r\n[]") for path, value in values.items()}
    is_lost = any(value in LOST for value in values.values())
    before_lost = values["fabric/state"] in ("Not Started", "In Progress")
    hypothesis.assume(not (is_lost and before_lost))  # a fabric's status may then not be read
    found = gpu_health.judge(smi.Card("0000:01:00.0", values))
    assert {(one.level, one.check) for one in found} == expected_levels(values)
    assert all("\n" not in one.text and len(one.text) < 200 for one in found)


@hypothesis.settings(max_examples=500)
@hypothesis.given(st.sampled_from(WORDS), values_of_any_kind)
def test_a_word_that_nobody_documents_is_a_warning_with_the_word(rule: smi.Rule, value: str):
    value = value.strip(" \t\r\n[]")
    hypothesis.assume(value not in {rule.good, *rule.bad, *smi.NOT_REPORTED, *LOST})
    (found,) = gpu_health.judge(smi.Card("0000:01:00.0", HEALTHY | {rule.path: value}))
    assert (found.level, found.check) == ("warn", "query")
    assert f"{value!r:.60}" in found.text


@pytest.mark.parametrize("path", [rule.path for rule in smi.RULES])
@pytest.mark.parametrize("value", ["GPU is lost", "[GPU requires reset]"])
def test_a_card_that_does_not_answer_is_one_fault(path: str, value: str):
    (found,) = judged(HEALTHY | {path: value})
    assert (found.level, found.text.partition(": ")[0]) == ("drain", value.strip("[]"))


@pytest.mark.parametrize(
    ("values", "uptime_s", "found"),
    [
        ({"fabric/state": "In Progress"}, 1000, ["fabric/state In Progress"]),
        ({"fabric/status": "Timeout"}, 1000, ["fabric/status Timeout"]),
        ({"fabric/state": "In Progress"}, 300, []),  # it has five minutes after boot
        (
            {"fabric/state": "In Progress", "fabric/status": "Unknown Error"},
            301,
            ["fabric/state In Progress"],
        ),
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
    "code", [8, 13, 31, 37, 43, 44, 45, 66, 68, 69, 93, 121, 137, 141, 152, 153, 157, 160]
)
def test_xids_of_applications_are_nothing(code: int):
    assert xids.judge(f"1.0 vm kernel: NVRM: Xid (PCI:0000:01:00): {code}, pid=79, name=79") is None


def test_an_xid_that_the_table_lacks_is_a_warning_with_its_line():
    found = xids.judge("1.0 vm kernel: NVRM: Xid (PCI:0000:01:00): 999, a new fault")
    assert found is not None
    assert (found.level, found.gpu) == ("warn", "0000:01:00.0")
    assert found.text == "Xid 999: unknown here, see NVIDIA's Xid errors: a new fault"
    assert xids.judge("NVRM: Xid (PCI:0000:01:00): 999, a new fault", {999: ""}) is None


KERNEL_LOG = pathlib.Path(__file__).with_name("xids_of_mig.log")


def test_the_xids_of_mig_are_those_of_the_card():
    found = [xids.judge(line) for line in KERNEL_LOG.read_text().splitlines()]
    assert [(one.level, one.text[:6], one.gpu) if one else None for one in found] == [
        ("drain", "Xid 95", "0000:01:00.0"),
        ("warn", "Xid 94", "0000:01:00.0"),
        ("drain", "Xid 48", "0000:01:00.0"),
        ("drain", "Xid 46", "0000:01:00.0"),
        None,
    ]


@hypothesis.settings(max_examples=500)
@hypothesis.given(
    place=st.sampled_from(["", " GPU-I:{:02}", " GPU-I:{:02} GPU-CI:00", " GPU-CI:{:02}"]),
    instance=st.integers(0, 14),
    code=st.integers(1, 200),
    card=st.sampled_from(["PCI:0000:01:00", "PCI:0001:C1:00", "0000:01:00"]),
    rest=st.sampled_from(["pid=7, name=python, Ch 8", "pid='<unknown>', name=<unknown>", ""]),
)
def test_an_instance_of_mig_changes_no_verdict(
    place: str, instance: int, code: int, card: str, rest: str
):
    whole = xids.judge(f"1.0 n0 kernel: NVRM: Xid ({card}): {code}, {rest}")
    part = xids.judge(f"1.0 n0 kernel: NVRM: Xid ({card}{place.format(instance)}): {code}, {rest}")
    assert part == whole


@hypothesis.settings(max_examples=500)
@hypothesis.given(rest=st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])))
def test_a_line_about_an_xid_that_no_pattern_fits_is_a_warning(rest: str):
    line = f"1.0 n0 kernel: NVRM: Xid{rest}"
    hypothesis.assume(xids.LINE.search(line) is None)
    found = xids.judge(line)
    assert found is not None
    assert (found.level, found.check) == ("warn", "xid")
    assert found.text == f"not understood: {'NVRM: Xid' + rest:.100}"


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
def test_invalid_lists_of_xids_are_refused(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match=r"^(write \+XID .*, not '|Xid 74 is both)"):
        xids.parse(text)
    with pytest.raises(SystemExit):
        gpu_health.main([f"--xids={text}"])
    assert "--xids: " in capsys.readouterr().err
