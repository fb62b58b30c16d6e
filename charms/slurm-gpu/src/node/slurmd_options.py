"""SLURMD_OPTIONS in /etc/default/slurmd: only `gres=` inside `--conf '...'` is changed.

Upstream's slurmd charm writes `SLURMD_OPTIONS=--conf 'cpus=... gres=... features=...' -Z -N
compute-0 ...` without quotes around the whole value, and reads it back later. A file that it would
not read raises `OptionsError`.
"""

import dataclasses
import pathlib
import re
import shlex

from slurm_ddp import files

PATH = pathlib.Path("/etc/default/slurmd")

_LINE = re.compile(r"^[ \t]*SLURMD_OPTIONS=(?P<value>.*)$", re.MULTILINE)
# As shlex.split delimits it
_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+""")
_GRES = re.compile(r"(?<!\S)(?P<key>(?i:gres)=)\S*")
_GRES_AND_SPACE = re.compile(r"^(?i:gres)=\S*\s?|\s(?i:gres)=\S*")
_TRIES = 5


class OptionsError(Exception):
    """Upstream's charm would not read the file as it is. `str()` is one line and names the file."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that matter here."""

    node: str | None  # -N
    conf: str | None  # --conf, as one string
    conf_server: str | None  # --conf-server: set once slurmd is related to slurmctld

    @property
    def settings(self) -> dict[str, str]:
        """The `key=value` words of `--conf`, keys in lower case."""
        pairs = (word.partition("=") for word in (self.conf or "").split() if "=" in word)
        return {key.lower(): value for key, _, value in pairs}

    @property
    def gres(self) -> str | None:
        """The Gres that the node registers with; None when it has none."""
        return self.settings.get("gres") or None


def read() -> Options | None:
    """Return the options, or None while slurmd's charm has not written them."""
    text = _read_text()
    return None if text is None else parse(text)


def parse(text: str) -> Options | None:
    """Return the options in the text of the file, or None when it sets none."""
    words = [value for _, value in _words(text)]
    if not words:
        return None
    conf, node, server = (_argument(words, flag) for flag in ("--conf", "-N", "--conf-server"))
    return Options(node=node, conf=conf, conf_server=server)


def ensure_gres(gres: str | None) -> bool:
    """Write the Gres into `--conf` of the file; return whether it changed.

    Upstream's hooks edit the file too, in parallel with an action and without a lock, so it is
    replaced only if it is still as it was read. If upstream restores the former Gres, the next hook
    registers the node again.
    """
    aside = PATH.with_name(f".{PATH.name}.slurm-gpu")
    for _ in range(_TRIES):
        text = _read_text()
        if text is None:
            raise OptionsError(f"{PATH}: does not exist")
        changed = with_gres(text, gres)
        if changed == text:
            return False
        files.ensure_file(aside, changed, mode=PATH.stat().st_mode & 0o7777)
        if _read_text() == text:
            aside.replace(PATH)
            return True
        files.ensure_absent(aside)
    raise OptionsError(f"{PATH}: changed {_TRIES} times while it was edited")


def with_gres(text: str, gres: str | None) -> str:
    """Return the text of the file with another Gres in `--conf`, and every other byte as it was."""
    words = _words(text)
    (start, end), before = words[_conf_index(words)]
    conf = _conf_with_gres(before, gres)
    if conf == before:
        return text
    if "\n" in conf or "'" in conf:
        raise OptionsError(f"{PATH}: --conf holds a quote or a line break")
    return f"{text[:start]}{shlex.quote(conf)}{text[end:]}"


def drained(text: str) -> str:
    """Return the environment file of a slurmd with the options of `text`, which starts drained."""
    words = _words(text)
    at = _conf_index(words)
    values = [value for _, value in words]
    values[at] = re.sub(r"(?<!\S)(?i:state)=\S*\s?", "", values[at]).rstrip() + " state=drain"
    return f"SLURMD_OPTIONS={shlex.join(values)}\n"


def merged_gres(current: str | None, gpus: str | None) -> str | None:
    """Return `gpus` and the rest of `current`, without its GPUs and their shards."""
    replaced = {"gpu", "shard"} | gres_names(gpus)
    kept = [item for item in (current or "").split(",") if not gres_names(item) & replaced]
    return ",".join(item for item in (gpus, *kept) if item) or None


def gres_names(gres: str | None) -> set[str]:
    """Return the names in a Gres: "gpu", "shard"."""
    return {item.partition(":")[0] for item in (gres or "").split(",")}


def _conf_with_gres(conf: str, gres: str | None) -> str:
    if not gres:
        return _GRES_AND_SPACE.sub("", conf, count=1)
    if _GRES.search(conf) is None:
        return f"{conf} gres={gres}"
    return _GRES.sub(lambda match: match["key"] + gres, conf, count=1)


def _read_text() -> str | None:
    try:
        return PATH.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as e:
        raise OptionsError(f"{PATH}: not UTF-8 text") from e


def _words(text: str) -> list[tuple[tuple[int, int], str]]:
    """Split the last SLURMD_OPTIONS as `shlex.split` does.

    Returns the span of each word in the text, and its value.
    """
    matches = list(_LINE.finditer(text))
    if not matches:
        return []
    start = matches[-1].start("value")
    value = matches[-1]["value"].rstrip()
    if value.endswith("\\"):
        raise OptionsError(f"{PATH}: SLURMD_OPTIONS goes on in a second line")
    # Quoted as a whole
    if len(value) >= 2 and value[0] == value[-1] == '"' and value.count('"') == 2:
        start, value = start + 1, value[1:-1]
    if _WORD.sub("", value).strip():
        raise OptionsError(f"{PATH}: a quote in SLURMD_OPTIONS is not closed")
    found = _WORD.finditer(text, start, start + len(value))
    return [(word.span(), (shlex.split(word[0]) or [""])[0]) for word in found]


def _conf_index(words: list[tuple[tuple[int, int], str]]) -> int:
    """Return the position of the value of `--conf`."""
    values = [value for _, value in words]
    if "--conf" not in values[:-1]:
        raise OptionsError(f"{PATH}: SLURMD_OPTIONS has no --conf '...'")
    return values.index("--conf") + 1


def _argument(words: list[str], flag: str) -> str | None:
    """Return the flag's value; as in upstream's parser, none that starts with a dash."""
    if flag not in words:
        return None
    following = [*words[words.index(flag) + 1 :], "-"][0]
    return None if following.startswith("-") else following
