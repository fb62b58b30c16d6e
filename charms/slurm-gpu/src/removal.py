"""Hand a machine back to Slurm and its administrators before its unit goes."""

import logging

import settings
from controller import gres_lines
from maintenance import hooks
from node import compute, journals
from slurm_ddp import exporter
from slurm_ddp.commands import CommandError

logger = logging.getLogger(__name__)


def hand_back(owner: str, config: settings.Config, *, is_last: bool) -> None:
    """Undo what the unit `owner` did on this machine; log a warning if something is left.

    A hook that fails keeps the unit from going, and the next one tries again.
    """
    try:
        exporter.ensure_none(owner)
        hooks.release()
        compute.release(owner=owner, config=config)
        gres_lines.release(owner=owner, last=is_last)
        journals.remove_folder()
    except CommandError as e:
        logger.warning("something of slurm-gpu is left on this machine: %s", e)
