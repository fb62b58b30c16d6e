"""What each Python of an environment does first (`ddptrain.pth`): prepare for importing torch without a waste of time.

Importing torch makes some hundred thousand objects that stay. To look through them for garbage again and again takes a
tenth of the import, in each rank, in torchrun and in a script that knows nothing of us. So the search rests meanwhile,
and what has been imported is left out of it for good (gc.freeze): full searches are shorter then, too.
"""

import gc
import importlib.machinery
import sys
import types
import typing

PACKAGE = "torch"


class Finder:
    """Finds torch where Python would, once, and has it executed while the search for garbage rests."""

    @classmethod
    def find_spec(cls, name: str, path: typing.Any = None, target: typing.Any = None) -> typing.Any:
        """Return the usual spec of torch, None for all else (importlib.abc.MetaPathFinder)."""
        if name != PACKAGE:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not gc.isenabled():
            return spec
        loader = typing.cast(typing.Any, spec.loader)
        execute = loader.exec_module

        def resting(module: types.ModuleType) -> None:
            del loader.exec_module  # the loader is as Python made it again
            gc.disable()
            try:
                execute(module)
            finally:
                gc.freeze()
                gc.enable()

        loader.exec_module = resting
        return spec


sys.meta_path.insert(0, Finder)
