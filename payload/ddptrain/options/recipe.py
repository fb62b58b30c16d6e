"""The recipe of a run: the recorded settings, and their changes, without torch or data.

A resumed run keeps its settings: those not given again come from its config.json, not from today's
defaults. A setting that is given and differs appears in the log and in the record, with the step at
which it changed.
"""

import collections.abc
import contextlib
import dataclasses
import pathlib
import typing

from ddptrain.ground import files, log
from ddptrain.options import config

Record = collections.abc.Mapping[str, typing.Any]

# A training with others of these has the same losses to the bit
WITHOUT_EFFECT = frozenset(
    "keep_checkpoints save_minutes log_every model_local_dir tokenizer_local_dir".split()
)
# Another run that starts from a checkpoint inherits these: they make it the same model and data
INHERITED = ("model", "layers", "heads", "width", "seq_len", "dropout", "seed", "precision")


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting that has another value from a step on."""

    setting: str
    before: object
    after: object
    step: int

    def __str__(self) -> str:
        """Return the change in words, with the setting's name as its flag has it."""
        name = self.setting.replace("_", "-")
        return f"{name} {_text(self.before)} -> {_text(self.after)} from step {self.step}"

    @property
    def has_effect(self) -> bool:
        """Whether the losses from there on are others than without the change."""
        return self.setting not in WITHOUT_EFFECT


def read(run_dir: pathlib.Path) -> dict[str, typing.Any]:
    """Return a run's record, its config.json; empty if it has none. Raises OSError."""
    path = run_dir / config.FILE
    try:
        found = files.retried(lambda: files.read_json(path))
    except FileNotFoundError:
        return {}
    except ValueError as e:
        log.warn(
            "CKPT", f"{path} cannot be read, so the settings are the checkpoint's", error=str(e)
        )
        return {}
    return found if "run_dir" in found else {}  # another program's


def settings_of(record: Record, *, is_own: bool) -> dict[str, typing.Any]:
    """Return the settings that a run inherits, from its own record or from its origin's."""
    known = config.from_record(record)
    if is_own:
        return {name: value for name, value in known.items() if name not in config.OF_ATTEMPT}
    return {name: value for name, value in known.items() if name in INHERITED}


def changes(before: Record, after: Record, step: int) -> list[Change]:
    """Return the settings that differ between two records, in the order of their declaration.

    The number of steps stands for the number of epochs, too. A setting that an old record lacks has
    not changed.
    """
    found: list[Change] = []
    for name in config.names():
        if name in config.OF_ATTEMPT or name == "epochs":
            continue
        old = before.get(name)
        new = after.get(name)
        if name == "steps":
            old = num_steps(before)
            new = num_steps(after)
        if old is not None and new is not None and old != new:
            found.append(Change(name, old, new, step))
    return found


def num_steps(record: Record) -> int | None:
    """Return how many steps a record means in all; None if only the data can tell."""
    steps = record.get("steps")
    if steps:
        return steps
    epochs = record.get("epochs")
    epoch_steps = record.get("epoch_steps")
    if not epochs or not epoch_steps:
        return None
    return epochs * epoch_steps


def history(record: Record) -> list[Change]:
    """Return the changes in a record. Malformed lines are left out."""
    names = {field.name for field in dataclasses.fields(Change)}
    listed = record.get(config.CHANGES)
    if not isinstance(listed, list):
        return []
    found: list[Change] = []
    for line in typing.cast(list[dict[str, typing.Any]], listed):
        if isinstance(line, dict) and line.keys() == names:  # pyright: ignore[reportUnnecessaryIsInstance]
            found.append(Change(**line))
    return found


def as_record(
    settings: config.Config, changed: collections.abc.Iterable[Change] = ()
) -> dict[str, typing.Any]:
    """Return a run's record: its settings, and their changes so far if there are any."""
    record = config.as_record(settings)
    lines = [dataclasses.asdict(change) for change in changed]
    if lines:
        record[config.CHANGES] = lines
    return record


def announced(run_dir: pathlib.Path, asked: config.Config) -> list[Change]:
    """Return the changes that a run will have if it continues with these settings.

    A setting that is not given stays as it was, so only given settings count.
    """
    record = read(run_dir)
    before = record
    step = 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it has no checkpoint yet
        meta = _newest_meta(run_dir)
        saved = int(meta["step"])
        before = meta["config"]
        step = saved
    own = config.complete(asked, "cpu", settings_of(record or before, is_own=True))
    found = changes(before, config.as_record(own), step)
    return [change for change in found if _is_given(change, asked)]


def _newest_meta(run_dir: pathlib.Path) -> dict[str, typing.Any]:
    """Read the facts in the manifest of `latest`, or without links of the last step.

    Raises OSError, ValueError, KeyError or TypeError.
    """
    manifest = "manifest.json"
    link = run_dir / "latest" / manifest
    paths = [link] if link.exists() else run_dir.glob(f"epoch-*/{manifest}")
    metas = [files.read_json(path)["meta"] for path in paths]
    return max(metas, key=lambda meta: int(meta["step"]))


def _is_given(change: Change, asked: config.Config) -> bool:
    names = [change.setting]
    if change.setting == "steps":
        names = [*config.LENGTH, "epoch_steps"]
    return any(getattr(asked, name) is not None for name in names)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
