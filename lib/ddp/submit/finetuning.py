"""Fine-tuning a local model: the checks before a run is submitted.

The payload's finetune module does the work.
"""

import collections.abc
import itertools

from ddp.problem import ParameterError, Step
from ddp.submit import payload_arguments
from ddp.workspace import checks, operations
from ddp.workspace.folders import Workspace

MODEL, TOKENIZER = "--model-local-dir", "--tokenizer-local-dir"
Words = collections.abc.Sequence[str]


def find_folders(words: Words, choices: payload_arguments.Choices) -> tuple[tuple[str, str], ...]:
    """List the flags and folders that the arguments of a run, or of a sweep's runs, name.

    Raises ParameterError if a flag lacks its path, or a tokenizer its model.
    """
    lines = [(*words, *payload_arguments.words(choice)) for choice in choices] or [words]
    found: dict[tuple[str, str], None] = {}
    for line in lines:
        paths = _paths(line)
        if TOKENIZER in paths and MODEL not in paths:
            raise ParameterError("args", f"{TOKENIZER} needs {MODEL}; give both")
        found |= dict.fromkeys(paths.items())
    return tuple(found)


def check_models(
    workspace: Workspace,
    named: collections.abc.Sequence[tuple[str, str]],
    *,
    has_transformers: bool,
) -> tuple[str, ...]:
    """Return the folders of the models that are tuned.

    The payload judges their files with the other arguments. Raises ParameterError if a folder
    cannot be read.
    """
    for flag, path in named:
        if not has_transformers:
            raise _needs_transformers()
        checks.check_inside(workspace, flag, path, kinds=("folder",))
    return tuple(sorted(path for flag, path in named if flag == MODEL))


def _needs_transformers() -> ParameterError:
    values = {"option": "transformers", "value": "true"}
    step = Step("change-option", "set transformers = true in the configuration of ddp", values)
    text = f"{MODEL} needs transformers in the jobs' environment"
    return ParameterError("args", text, remedy=step)


def check_text(workspace: Workspace, wanted: str | None) -> None:
    """Check the text that a model is tuned on, unless it is a dataset by name.

    Raises ParameterError.
    """
    if wanted is None:
        example = "a file or folder of JSON lines, such as /mnt/shared/chat.jsonl"
        raise ParameterError("dataset", f"fine-tuning needs {example}")
    if "/" not in wanted:
        return
    checks.check_inside(workspace, "dataset", wanted, kinds=("file", "folder"))
    found = workspace.do(operations.measure_source, timeout_s=60, path=wanted, part_bytes=1 << 30)
    if not found.num_bytes:
        raise ParameterError(
            "dataset", f"{wanted} is empty; it needs JSON lines, and val.jsonl for validation"
        )


def _paths(args: Words) -> dict[str, str]:
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
