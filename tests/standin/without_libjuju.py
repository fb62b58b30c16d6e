"""A pytest plugin: pytest-operator without its library, which speaks to a controller's API and so needs a real one.

The model is made with the juju client; everything else, `OpsTest.juju` above all, is pytest-operator's own.
"""

import types
import typing

from pytest_operator import plugin  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

_plugin: typing.Any = plugin  # pyright: ignore[reportUnknownVariableType]


async def _setup_model(self: typing.Any) -> None:
    await self.run("juju", "add-model", "test", check=True)
    self._models["main"] = types.SimpleNamespace(full_name="standin:test")
    self._current_alias = "main"


async def _cleanup_models(self: typing.Any) -> None:
    await self.run("juju", "destroy-model", "--no-prompt", "test", check=True)


_plugin.OpsTest._setup_model = _setup_model
_plugin.OpsTest._cleanup_models = _cleanup_models
_plugin.check_deps = lambda *names: None
