"""SLURMD_OPTIONS in /etc/default/slurmd: reading it, and changing only the GPUs in it.

Upstream's slurmd charm writes `SLURMD_OPTIONS=--conf 'cpus=... gres=... features=...' -Z -N compute-0 --conf-server
...`: the value is not quoted as a whole, `shlex.join` quotes each word, and the charm reads the line back on later
events. Of all that only `gres=` inside `--conf '...'` is ours; every other byte of the file stays as it is.
"""

import collections.abc
import dataclasses
import pathlib
import re
import shlex

from slurm_ddp import files

PATH = pathlib.Path("/etc/default/slurmd")
SLURM_CONF = pathlib.Path("/etc/slurm/slurm.conf")

_LINE = re.compile(r"^(?P<head>[ \t]*SLURMD_OPTIONS=)(?P<value>.*)$", re.MULTILINE)
_GRES_WORD = re.compile(r"(?<!\S)(?i:gres)=(?P<value>\S*)")
_GPU = "gpu"
_TRIES = 5


class OptionsError(Exception):
    """The file is not in a form that upstream's charm would read. `str()` is one line and names the file."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What SLURMD_OPTIONS says."""

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


@dataclasses.dataclass(frozen=True)
class _Word:
    start: int
    end: int
    value: str


def read() -> Options | None:
    """Return the options, or None while slurmd's charm has not written them.

    Raises:
        OptionsError: they cannot be understood.
    """
    text = _read_text()
    return None if text is None else parse(text)


def parse(text: str) -> Options | None:
    """Return the options in the text of the file, or None when it sets none."""
    span = _value_span(text)
    if span is None:
        return None
    words = [word.value for word in _words(text, *span)]
    if not words:
        return None
    conf, node, server = (_argument(words, flag) for flag in ("--conf", "-N", "--conf-server"))
    return Options(node=node, conf=conf, conf_server=server)


def is_local() -> bool:
    """Whether this slurmd reads files of this machine: it has a slurm.conf and no server to fetch one from."""
    options = read()
    return (options is None or options.conf_server is None) and SLURM_CONF.exists()


def ensure_gres(gres: str | None) -> bool:
    """Write the Gres into `--conf` of the file; return whether it was another.

    Upstream's slurmd edits the file, too, in its hooks, beside which a parallel action may run. So it is replaced only
    if it still is what the new text was made from. Upstream takes no lock: what it read before and writes after this
    brings the former Gres back, and the next hook registers the node anew.

    Raises:
        OptionsError: it is not there, has no `--conf`, or changes all the time.
    """
    aside = PATH.with_name(f".{PATH.name}.slurm-gpu")
    for _ in range(_TRIES):
        text = _read_text()
        if text is None:
            raise OptionsError(f"{PATH}: not there")
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
    """Return the text of the file with another Gres in `--conf`, and every other byte as it was.

    Raises:
        OptionsError: there is no `--conf 'V'` to write it into.
    """
    span = _value_span(text)
    words = _words(text, *span) if span else []
    values = [word.value for word in words]
    if "--conf" not in values or values.index("--conf") + 1 >= len(values):
        raise OptionsError(f"{PATH}: SLURMD_OPTIONS has no --conf '...'")
    word = words[values.index("--conf") + 1]
    conf = _conf_with_gres(word.value, gres)
    if conf == word.value:
        return text
    if "\n" in conf or "'" in conf:
        raise OptionsError(f"{PATH}: --conf holds a quote or a line break")
    return f"{text[: word.start]}{shlex.quote(conf)}{text[word.end :]}"


def held(text: str) -> str:
    """Return an environment file that starts slurmd with the options of `text`, its node registering drained."""
    span = _value_span(text)
    words = _words(text, *span) if span else []
    values = [word.value for word in words]
    if "--conf" not in values:
        raise OptionsError(f"{PATH}: SLURMD_OPTIONS has no --conf '...'")
    at = values.index("--conf") + 1
    values[at] = re.sub(r"(?<!\S)(?i:state)=\S*\s?", "", values[at]).rstrip() + " state=drain"
    return f"SLURMD_OPTIONS={shlex.join(values)}\n"


def merged_gres(current: str | None, gpus: str | None, owned: collections.abc.Iterable[str] = ()) -> str | None:
    """Return a Gres with the GPUs of `gpus` and whatever else `current` holds.

    Args:
        current: what is configured.
        gpus: what this machine's cards call for.
        owned: names of Gres that are ours besides `gpu`, so that those of `current` go.
    """
    ours = {_GPU, *owned, *(item.partition(":")[0] for item in (gpus or "").split(","))}
    others = [item for item in (current or "").split(",") if item and item.partition(":")[0] not in ours]
    return ",".join([*([gpus] if gpus else []), *others]) or None


def _conf_with_gres(conf: str, gres: str | None) -> str:
    match = _GRES_WORD.search(conf)
    if match is None:
        return f"{conf} gres={gres}" if gres else conf
    if gres:
        return conf[: match.start("value")] + gres + conf[match.end("value") :]
    start, end = match.span()
    if start > 0:
        start -= 1  # with the space before it
    elif end < len(conf):
        end += 1
    return conf[:start] + conf[end:]


def _read_text() -> str | None:
    try:
        return PATH.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as e:
        raise OptionsError(f"{PATH}: not UTF-8 text") from e


def _value_span(text: str) -> tuple[int, int] | None:
    """Return where the value of the last SLURMD_OPTIONS stands, inside the quotes if it is quoted as a whole."""
    matches = list(_LINE.finditer(text))
    if not matches:
        return None
    start, end = matches[-1].span("value")
    value = text[start:end]
    end -= len(value) - len(value.rstrip())
    value = text[start:end]
    if value.endswith("\\"):
        raise OptionsError(f"{PATH}: SLURMD_OPTIONS goes on in a second line")
    if len(value) >= 2 and value[0] == value[-1] == '"' and value.count('"') == 2:
        return start + 1, end - 1
    return start, end


def _words(text: str, start: int, end: int) -> list[_Word]:
    """Split as `shlex.split` does, and keep where each word stands."""
    words: list[_Word] = []
    at = start
    while at < end:
        if text[at].isspace():
            at += 1
            continue
        begin = at
        quote = ""
        while at < end and (quote or not text[at].isspace()):
            if text[at] == "\\" and quote != "'":
                at += 1
            elif text[at] == quote:
                quote = ""
            elif not quote and text[at] in "'\"":
                quote = text[at]
            at += 1
        if quote or at > end:
            raise OptionsError(f"{PATH}: a quote in SLURMD_OPTIONS is not closed")
        value = shlex.split(text[begin:at])
        words.append(_Word(begin, at, value[0] if value else ""))
    return words


def _argument(words: list[str], flag: str) -> str | None:
    """Return what follows the flag, as upstream's parser takes it: nothing that starts with a dash."""
    if flag not in words:
        return None
    rest = words[words.index(flag) + 1 :]
    return rest[0] if rest and not rest[0].startswith("-") else None
