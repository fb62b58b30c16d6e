"""Run handlers as upstream's charms do: conditions first, deferring on failure; then the status."""

import collections.abc
import functools
import logging
import typing

import ops

from common import conf

logger = logging.getLogger(__name__)


class Stop(Exception):
    """Ends a handler with the status that the unit gets instead of what `check` finds."""

    def __init__(self, status: ops.StatusBase) -> None:
        super().__init__(status.message)
        self.status = status


class Standin(ops.CharmBase):
    """A charm whose status is `check()` after every handler that `refreshes` wraps."""

    _stored = ops.StoredState()

    def __init__(self, framework: ops.Framework) -> None:
        super().__init__(framework)
        self._stored.set_default(departing=False)

    @property
    def is_of_main(self) -> bool:
        """Whether upstream's main for Ubuntu 26.04 is played, or its track 25.11 for 24.04.

        The sandbox writes the application's base to the charm's folder.
        """
        base = self.charm_dir / "base"
        return base.is_file() and base.read_text() == "ubuntu@26.04"

    def check(self) -> ops.StatusBase:
        """Return the unit's status as its services and relations are now."""
        raise NotImplementedError

    def note_departing(self, event: ops.RelationDepartedEvent) -> None:
        """Remember that this unit leaves, and not the relation: relation-broken cannot tell."""
        if event.departing_unit == self.unit:
            self._stored.departing = True

    def refuse(self, refused: conf.OptionsRefused) -> None:
        """Block on invalid options. The caller then observes no event, as upstream."""
        logger.error("%s", refused)
        names = ", ".join(refused.reasons)
        self.unit.status = ops.BlockedStatus(
            f"fix config: {names}; see juju debug-log. Until then no event is handled"
        )

    def stop_for(self, refused: conf.OptionsRefused, event: ops.EventBase | None = None) -> "Stop":
        """Make the exception for a handler with invalid options; a given event comes again."""
        logger.error("%s", refused)
        if event is not None:
            event.defer()
        names = ", ".join(refused.reasons)
        return Stop(ops.BlockedStatus(f"fix config: {names}; see juju debug-log"))


Charm = typing.TypeVar("Charm", bound=Standin)
Event = typing.TypeVar("Event", bound=ops.EventBase)


def refreshes(
    handler: collections.abc.Callable[[Charm, Event], None],
) -> collections.abc.Callable[[Charm, Event], None]:
    """Set the unit's status after `handler`. Any exception but `Stop` is a hook error."""

    @functools.wraps(handler)
    def wrapped(charm: Charm, event: Event) -> None:
        try:
            handler(charm, event)
        except Stop as e:
            charm.unit.status = e.status
        else:
            charm.unit.status = charm.check()

    return wrapped


def refreshes_on_leader(
    handler: collections.abc.Callable[[Charm, Event], None],
) -> collections.abc.Callable[[Charm, Event], None]:
    """Set the unit's status after `handler`; skip both on units that do not lead."""

    @functools.wraps(handler)
    def wrapped(charm: Charm, event: Event) -> None:
        if charm.unit.is_leader():
            refreshes(handler)(charm, event)

    return wrapped


def wait_unless(
    event: ops.EventBase,
    holds: bool,
    message: str,
    status: type[ops.StatusBase] = ops.WaitingStatus,
) -> None:
    """Defer the event and wait, or take another `status`, unless the condition holds; or `Stop`."""
    if not holds:
        event.defer()
        raise Stop(status(message))
