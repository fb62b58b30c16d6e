"""Fine-tuning a local model: the checks before a run is submitted. The payload's finetune module does the work."""

import collections.abc
import itertools

from ddp.base import ParameterError, Settings
from ddp.options import models
from ddp.problem import Step
from ddp.submit import checks
from ddp.workspace import folders, operations

MODEL, TOKENIZER = "--model-local-dir", "--tokenizer-local-dir"
_TAKEN = {"--data": "dataset", "--run-dir": "run"}  # set by submit, and the option for each
Choices = collections.abc.Sequence[collections.abc.Mapping[str, object]]


def check(settings: Settings, params: models.Training, choices: Choices) -> tuple[str, ...]:
    """List the folders of the models that a run of the payload tunes. Raises ParameterError if one is not readable.

    `choices` are the options of a sweep's runs, which come on top of `args`.
    """
    given = _paths(params.words)
    for flag, parameter in _TAKEN.items():
        if flag in given:
            raise ParameterError("args", f"{flag} is set by ddp; use the option {parameter}")
    swept = [{flag: str(choice[flag[2:]]) for flag in (MODEL, TOKENIZER) if flag[2:] in choice} for choice in choices]
    for source, paths in (("args", given), *(("options", paths) for paths in swept)):
        if TOKENIZER in paths and MODEL not in given | paths:
            raise ParameterError(source, f"{TOKENIZER} needs {MODEL}; give both")
    if not any(MODEL in paths for paths in (given, *swept)):
        return ()
    if not settings.transformers and not params.container_image:
        values = {"option": "transformers", "value": "true"}
        step = Step("change-option", "set transformers = true in the configuration of ddp", values)
        raise ParameterError("args", f"{MODEL} needs transformers in the jobs' environment", remedy=step)
    checked: set[tuple[str, str]] = set()
    for source, paths in (("args", given), *(("options", paths) for paths in swept)):
        for flag, path in paths.items():
            if (flag, path) not in checked:
                _check_folder(settings, f"{source}: {flag}", path, is_model=flag == MODEL)
                checked.add((flag, path))
    return tuple(sorted({path for flag, path in checked if flag == MODEL}))


def dataset(settings: Settings, wanted: str | None) -> None:
    """Check the text that a model is tuned on, unless it is a dataset by name. Raises ParameterError."""
    if wanted is None:
        raise ParameterError(
            "dataset", "fine-tuning needs a file or folder of JSON lines, such as /mnt/shared/chat.jsonl"
        )
    if "/" not in wanted:
        return
    checks.check_inside(settings, "dataset", wanted, kinds=("file", "folder"))
    found = folders.call(settings, operations.measure_source, timeout_s=60, path=wanted, part_bytes=1 << 30)
    if not found["bytes"]:
        raise ParameterError("dataset", f"{wanted} is empty; it needs JSON lines, and val.jsonl for validation")


def _check_folder(settings: Settings, name: str, path: str, *, is_model: bool) -> None:
    checks.check_inside(settings, name, path, kinds=("folder",))
    if is_model and folders.locate(settings, f"{path}/config.json").kind != "file":
        raise ParameterError(name, f"{path} has no config.json; save the model there with save_pretrained")


def _paths(args: collections.abc.Sequence[str]) -> dict[str, str]:
    """Find the last value of each flag that names a path. Raises ParameterError if one has none."""
    flags = (MODEL, TOKENIZER, *_TAKEN)
    found: dict[str, str] = {}
    for word, following in itertools.pairwise([*args, ""]):
        flag, equals, value = word.partition("=")
        if flag not in flags:
            continue
        found[flag] = value if equals else following
        if not found[flag] or found[flag].startswith("-"):
            raise ParameterError("args", f"{flag} has no value; write {flag} PATH")
    return found
