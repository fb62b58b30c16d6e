"""Fine-tuning a local model: the checks before a run is submitted. The payload's finetune module does the work."""

import collections.abc
import itertools

from ddp.options import models
from ddp.problem import ParameterError, Step
from ddp.settings import Settings
from ddp.submit import precheck
from ddp.workspace import checks, operations
from ddp.workspace.folders import Workspace

MODEL, TOKENIZER = "--model-local-dir", "--tokenizer-local-dir"


def check(
    settings: Settings, params: models.Training, choices: precheck.Choices
) -> tuple[str, ...]:
    """List the folders of the models that a run of the payload tunes. Raises ParameterError if one is not readable."""
    lines = [(*params.words, *precheck.words(params.workload, choice)) for choice in choices] or [
        params.words
    ]
    runs = [_paths(line) for line in lines]
    if any(TOKENIZER in paths and MODEL not in paths for paths in runs):
        raise ParameterError("args", f"{TOKENIZER} needs {MODEL}; give both")
    named = dict.fromkeys(item for paths in runs for item in paths.items())
    if not named:
        return ()
    if not (settings.transformers or params.container_image or params.own_python):
        values = {"option": "transformers", "value": "true"}
        step = Step("change-option", "set transformers = true in the configuration of ddp", values)
        raise ParameterError(
            "args", f"{MODEL} needs transformers in the jobs' environment", remedy=step
        )
    for flag, path in named:
        checks.check_inside(settings.workspace, flag, path, kinds=("folder",))
        if flag == MODEL and settings.workspace.locate(f"{path}/config.json").kind != "file":
            raise ParameterError(
                flag, f"{path} has no config.json; save the model there with save_pretrained"
            )
    return tuple(sorted(path for flag, path in named if flag == MODEL))


def dataset(workspace: Workspace, wanted: str | None) -> None:
    """Check the text that a model is tuned on, unless it is a dataset by name. Raises ParameterError."""
    if wanted is None:
        example = "a file or folder of JSON lines, such as /mnt/shared/chat.jsonl"
        raise ParameterError("dataset", f"fine-tuning needs {example}")
    if "/" not in wanted:
        return
    checks.check_inside(workspace, "dataset", wanted, kinds=("file", "folder"))
    found = workspace.do(operations.measure_source, timeout_s=60, path=wanted, part_bytes=1 << 30)
    if not found["bytes"]:
        raise ParameterError(
            "dataset", f"{wanted} is empty; it needs JSON lines, and val.jsonl for validation"
        )


def _paths(args: collections.abc.Sequence[str]) -> dict[str, str]:
    """Find the last value of each flag that names a path. Raises ParameterError if one has none."""
    found: dict[str, str] = {}
    for word, following in itertools.pairwise([*args, ""]):
        flag, equals, value = word.partition("=")
        if flag not in (MODEL, TOKENIZER):
            continue
        found[flag] = value if equals else following
        if not found[flag] or found[flag].startswith("-"):
            raise ParameterError("args", f"{flag} has no value; write {flag} PATH")
    return found
