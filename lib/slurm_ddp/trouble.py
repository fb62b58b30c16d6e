"""How a charm's status states a failure of JuiceFS or of a command: the charm waits, or the operator must act."""

import collections.abc
import contextlib
import typing

from slurm_ddp import juicefs
from slurm_ddp.run import CommandError


class Maker(typing.Protocol):
    """Makes the exception that carries a status."""

    def __call__(self, error: Exception, text: str, /, *, passes: bool) -> Exception:
        """Make it of the error, its one line, and whether it may end by itself (then the charm waits)."""
        ...


@contextlib.contextmanager
def explained(
    app: str, make: Maker, *, passing: tuple[type[Exception], ...] = (), lasting: tuple[type[Exception], ...] = ()
) -> collections.abc.Generator[None]:
    """Raise what `make` makes of a failure inside, with advice that names the application.

    `passing` failures may end by themselves, as a server of the volume that does not answer; the operator must resolve
    `lasting` ones, and those of juicefs and other commands.
    """
    try:
        yield
    except (juicefs.UnreachableError, *passing) as e:
        raise make(e, str(e), passes=True) from e
    except (juicefs.JuicefsError, CommandError, *lasting) as e:
        text = juicefs.advice(e, app) if isinstance(e, juicefs.JuicefsError) else str(e)
        raise make(e, text, passes=False) from e
