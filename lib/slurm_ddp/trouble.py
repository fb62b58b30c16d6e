"""What fails below a charm that deals with JuiceFS, as its status tells it: the charm waits, or a person must act."""

import collections.abc
import contextlib
import typing

from slurm_ddp import juicefs
from slurm_ddp.run import CommandError


class Teller(typing.Protocol):
    """Makes the exception that carries a status."""

    def __call__(self, error: Exception, said: str, /, *, passes: bool) -> Exception:
        """Return it.

        Args:
            error: what was raised.
            said: what to say of it: one line, with what to do where one command mends it.
            passes: it may mend itself, so the charm waits; else a person must act, and the charm is blocked.
        """
        ...


@contextlib.contextmanager
def explained(
    app: str,
    tell: Teller,
    *,
    passing: tuple[type[Exception], ...] = (),
    lasting: tuple[type[Exception], ...] = (),
) -> collections.abc.Generator[None]:
    """Turn what fails inside into what `tell` makes of it.

    Args:
        app: the application, which the advice names.
        tell: makes the exception that is raised instead.
        passing: what may mend itself, besides a server of the volume that does not answer.
        lasting: what a person must mend, besides what juicefs and other commands say.
    """
    try:
        yield
    except (juicefs.UnreachableError, *passing) as e:
        raise tell(e, str(e), passes=True) from e
    except juicefs.JuicefsError as e:
        raise tell(e, juicefs.advice(e, app), passes=False) from e
    except (CommandError, *lasting) as e:
        raise tell(e, str(e), passes=False) from e
