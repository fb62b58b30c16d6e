"""Errors that a user can fix, each with its remedy as a value that a front end puts into words."""

import collections.abc
import dataclasses
import shlex

Results = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of this program.

    `Command("submit", {"time-limit": 30})` is `ddp submit --time-limit 30`. `arguments` stand
    without a flag, such as a run's name. Options that are None or "" are left out.
    """

    verb: str  # the words behind `ddp`, such as "env create"
    options: collections.abc.Mapping[str, object] = dataclasses.field(
        default_factory=dict[str, object]
    )
    arguments: tuple[str, ...] = ()

    @property
    def given(self) -> dict[str, str]:
        """The options that have a value, as texts."""
        given = {name: value for name, value in self.options.items() if value not in (None, "")}
        return {name: str(value) for name, value in given.items()}


@dataclasses.dataclass(frozen=True)
class Step:
    """A step for the cluster's operator: plain words or a shell command.

    A front end may have its own words for it, by `name`.
    """

    name: str
    text: str
    values: collections.abc.Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


Remedy = Command | Step
Render = collections.abc.Callable[[Remedy], str]


def plain(remedy: Remedy) -> str:
    """Render a remedy as a user of a terminal types it."""
    if isinstance(remedy, Step):
        return remedy.text
    words = ["ddp", *remedy.verb.split()]
    for name, value in remedy.given.items():
        words.append(f"--{name}")
        if value != "true":
            words.append(value)
    return shlex.join([*words, *remedy.arguments])


class Problem(Exception):
    """A failure that a user or operator can fix. `str()` is a line: what failed, why, what to type.

    `what` is that line without the remedy; `results` are known all the same, and shown with it.
    """

    def __init__(
        self, what: str, *, remedy: Remedy | None = None, results: Results | None = None
    ) -> None:
        self.what = one_line(what)
        self.remedy = remedy
        self.results: Results = results or {}
        super().__init__(self.what)

    def text(self, render: Render = plain) -> str:
        """Return the line with the remedy in a front end's words."""
        if self.remedy is None:
            return self.what
        return one_line(f"{self.what}; {render(self.remedy)}")

    def __str__(self) -> str:
        return self.text()


class ParameterError(Problem):
    """An option is rejected; the message begins with its name."""

    def __init__(self, name: str, message: str, *, remedy: Remedy | None = None) -> None:
        super().__init__(f"{name}: {message}", remedy=remedy)
        self.name = name


class UnfinishedError(Exception):
    """A command ends before its run does, and has not failed; `results` are those so far."""

    def __init__(self, run: str, results: Results) -> None:
        super().__init__(f"{run} goes on")
        self.run = run
        self.results = results

    @property
    def remedy(self) -> Remedy:
        """The command that follows the run."""
        return Step("follow-run", f"ddp watch {self.run}", {"run": self.run})


def one_line(text: str, limit: int = 600) -> str:
    """Join `text` to one printable line of at most `limit` characters."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    flat = " ".join(printable.split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def shown(value: object, limit: int = 60) -> str:
    """Quote a value for a message, printable and short."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[: limit - 8]}...{text[-5:]}"
