"""The kinds of workload, a class for each: its checks, the command of its ranks, and its facts.

`of` makes one from the options; `resolve` checks the options of its kind and finds the files they
name; `check` checks the rest once the run has a name. Nothing is written before all of them pass.
"""

import abc
import contextlib
import dataclasses
import difflib
import pathlib
import typing

from ddp.environment import store
from ddp.node import spec
from ddp.options import fields, models
from ddp.problem import Command, ParameterError
from ddp.project import copies
from ddp.run import catalog
from ddp.settings import Settings
from ddp.submit import (
    finetuning,
    links,
    payload_arguments,
    preparation,
    program_source,
    resources,
    scripts,
)
from ddp.workspace import checks
from ddp.workspace.folders import Contents, Workspace

BUILT_IN = ("gpt", "smoke")
DEFAULT_PROFILED_STEPS = "10-12"  # after the first ones, which compile and allocate
_LIKE_A_COMMAND = 0.75  # as train is like train.py, and litgpt is not like gpt
Words = tuple[str | spec.Word, ...]


@dataclasses.dataclass
class Notes:
    """The results of a training's checks: those that passed, and remarks on possible failures."""

    passed: list[str] = dataclasses.field(default_factory=list[str])
    remarks: list[str] = dataclasses.field(default_factory=list[str])

    def add(self, *passed: str) -> None:
        """Add checks that passed; an empty one is left out."""
        self.passed += filter(None, passed)

    def remark(self, *remarks: str) -> None:
        """Add remarks; an empty one is left out."""
        self.remarks += filter(None, remarks)


@dataclasses.dataclass(frozen=True)
class Case:
    """The inputs of a workload's checks, and their results."""

    request: resources.Request
    contents: Contents
    wanted_run: str | None  # as the options name it
    choices: payload_arguments.Choices  # of a sweep's runs
    notes: Notes


@dataclasses.dataclass(frozen=True)
class RunName:
    """The run that a submission makes, or goes on with."""

    name: str
    is_again: bool = False  # its folder exists
    remark: str = ""  # on a folder that holds no run yet, or a damaged one


@dataclasses.dataclass(frozen=True)
class Workload(abc.ABC):
    """The program of the ranks, with its options."""

    kind: typing.ClassVar[str]

    workspace: Workspace
    payload: pathlib.Path  # the payload's code on this host
    params: models.Training
    resume: str = "auto"  # auto, never or a run's name
    stored_payload: str = ""  # in the workspace: for a container, or the user's own Python
    has_transformers: bool = False  # in the environment of all jobs
    dataset: str | None = None  # its path
    prepares: bool = False  # the dataset is the default one, and has to be made first
    kept: copies.Copy | None = None  # the copy of a user's project

    @property
    def label(self) -> str:
        """The first part of a new run's name."""
        return self.kind

    def resolve(self, case: Case) -> "Workload":
        """Refuse the options that only gpt has. Raises ParameterError."""
        del case  # the options of other kinds name nothing that is to be found
        if self.params.dataset is not None:
            self._refuse_option("dataset")
        if self.resume != "auto":
            self._refuse_option("resume", "; a script goes on in its own run: --run NAME")
        return self

    @abc.abstractmethod
    def check_again(self, run: str) -> None:
        """Raise ParameterError if this workload cannot go on in the folder of an earlier run."""

    @abc.abstractmethod
    def check(self, case: Case, run: RunName) -> None:
        """Check the arguments, and the kind's other options. Raises ParameterError."""

    @abc.abstractmethod
    def options_of(self, choice: payload_arguments.Choice) -> list[str]:
        """Format the options of a sweep's run as the workload takes them."""

    @abc.abstractmethod
    def program(self) -> scripts.Program:
        """Build the command of the ranks."""

    def facts(self) -> dict[str, object]:
        """Describe the workload for job.json."""
        return {"kind": self.kind, "workload": self.params.workload, "dataset": self.dataset}

    def _refuse_option(self, name: str, hint: str = "") -> typing.NoReturn:
        raise ParameterError(name, f"only the workload gpt has it{hint}")

    def _refuse_profile(self) -> None:
        _check_profile_options(self.params)
        if self.params.profile:
            self._refuse_option("profile", "; a script starts torch.profiler itself")


class Payload(Workload):
    """A workload of the payload: its own parser checks the arguments, and it measures by itself."""

    command: typing.ClassVar[str]

    def check(self, case: Case, run: RunName) -> None:
        """Check the options of profiles and metrics, and the arguments. Raises ParameterError."""
        if self.params.launcher != "torchrun":
            self._refuse_launcher()
        self._check_profile(case.request)
        if self.params.metric:
            text = f"only a script has it; the workload {self.kind} measures by itself"
            raise ParameterError("metric", text)
        if self.params.again:
            text = f"only a script has it; the workload {self.kind} continues by itself"
            raise ParameterError("again", text)
        folder = str(self.workspace.runs / run.name)
        words = self.params.words
        case.notes.add(
            payload_arguments.check(self.payload, self.kind, folder, words, case.choices)
        )

    def _refuse_launcher(self) -> typing.NoReturn:
        text = f"only a script has it; the workload {self.kind} is started by torchrun"
        raise ParameterError("launcher", text)

    @abc.abstractmethod
    def _check_profile(self, request: resources.Request) -> None:
        """Check the options of a profile. Raises ParameterError."""

    def options_of(self, choice: payload_arguments.Choice) -> list[str]:
        """Format options as the payload's parser takes them."""
        return payload_arguments.words(choice)

    def program(self) -> scripts.Program:
        """Build the payload's command."""
        run_dir = ("--run-dir", scripts.RUN_DIR)
        command = ("--module", "ddptrain", self.command, *run_dir, *self._flags())
        return scripts.Program(
            (*command, *self.params.words),
            leaves_outcome=True,
            resume=self._resume_from(),
            payload=self.stored_payload,
        )

    def _flags(self) -> Words:
        return ()

    def _resume_from(self) -> str:
        return "auto"


class Smoke(Payload):
    """A small model on random data, which shows within a minute that the cluster trains."""

    kind = "smoke"
    command = "smoke"

    def _check_profile(self, request: resources.Request) -> None:
        del request  # only gpt is profiled
        self._refuse_profile()

    def check_again(self, run: str) -> None:
        """Raise ParameterError: a smoke test cannot continue a run."""
        raise ParameterError("run", f"{run} exists already; choose another name")


class Gpt(Payload):
    """The payload's GPT, trained from its beginning, or tuned from a local model."""

    kind = "gpt"
    command = "train"

    def resolve(self, case: Case) -> "Gpt":
        """Find the dataset, and the checkpoint and model to start from. Raises ParameterError."""
        params = self.params
        named = finetuning.find_folders(params.words, case.choices)
        has_own = bool(params.container_image or params.own_python)
        tuned = finetuning.check_models(
            self.workspace, named, has_transformers=has_own or self.has_transformers
        )
        if tuned:
            case.notes.add(f"model: {', '.join(tuned)} is readable")

        self._check_resume()
        dataset = self._dataset_of(case.wanted_run)
        prepares = False
        if dataset is None:
            dataset, prepares = self._find_dataset(case.contents, tunes=bool(tuned))
        return dataclasses.replace(self, dataset=dataset, prepares=prepares)

    def check_again(self, run: str) -> None:
        """Raise ParameterError if it starts from another run, which takes a new folder."""
        if self.resume != "auto":
            text = f"{run} exists already; choose another name, or resume auto"
            raise ParameterError("run", text)

    def check(self, case: Case, run: RunName) -> None:
        """Check the arguments, and remark on those that change as a run goes on.

        Raises ParameterError.
        """
        case.notes.add(
            f"dataset: {self.dataset} {'is prepared first' if self.prepares else 'exists'}"
        )
        super().check(case, run)
        folder = str(self.workspace.runs / run.name)
        words = self.params.words
        if run.is_again:
            case.notes.remark(*payload_arguments.changes(self.payload, folder, words))
        link = None if case.choices else links.measured(self.workspace, case.request)
        if link is not None:
            chosen = payload_arguments.settings(self.payload, folder, words)
            dataset = None if self.prepares else self.dataset
            remark = links.recommend(
                self.workspace,
                self.payload,
                case.request,
                link=link,
                chosen=chosen,
                dataset=dataset,
            )
            case.notes.remark(remark)

    def _check_profile(self, request: resources.Request) -> None:
        _check_profile_options(self.params)
        if not self.params.profile:
            return
        most = request.num_nodes * request.ranks_per_node
        for rank in self.params.profile_ranks.split(","):
            if int(rank) >= most:
                text = f"no rank {rank}; the job has {most}, from 0"
                raise ParameterError("profile-ranks", text)

    def _flags(self) -> Words:
        flags = ("--data", str(self.dataset), "--resume", scripts.RESUME)
        params = self.params
        if not params.profile:
            return flags
        steps = params.profile_steps or DEFAULT_PROFILED_STEPS
        chosen = ("--profile-ranks", params.profile_ranks, "--profile-steps", steps)
        return (*flags, "--profile", *chosen)

    def _resume_from(self) -> str:
        if self.resume in ("auto", "never"):
            return self.resume
        return str(self.workspace.runs / self.resume)

    def _check_resume(self) -> None:
        """Raise ParameterError unless the run to start from is one of gpt, with a checkpoint.

        One whose job is awaited need not have saved yet.
        """
        other = self.resume
        if other in ("auto", "never"):
            return
        kind = catalog.read_record(self.workspace, other).get("kind")
        if kind != self.kind:
            text = f"no run {other!r} of the workload gpt in {self.workspace.runs}"
            text += "; use auto, never or the name of one"
            if kind:
                text = f"{other} is a run of a {kind}; it goes on in its own folder: --run {other}"
            raise ParameterError("resume", text, remedy=Command("list"))

        is_awaited = self.params.dependency is not None
        if not is_awaited and not self.workspace.has_checkpoint(other):
            show = Command("show", arguments=(other,))
            raise ParameterError("resume", f"{other} has no checkpoint to start from", remedy=show)

    def _dataset_of(self, run: str | None) -> str | None:
        """Return the dataset that a run was trained on, unless the options name one.

        Raises ParameterError.
        """
        if run is None or self.params.dataset is not None:
            return None
        path = str(catalog.read_record(self.workspace, run).get("dataset") or "")
        if path and self.workspace.locate(path).kind == "absent":
            text = f"{path}, which the run was trained on, does not exist any more"
            raise ParameterError("dataset", text)
        return path or None

    def _find_dataset(self, contents: Contents, *, tunes: bool) -> tuple[str, bool]:
        """Find the dataset's path, and whether it must be prepared first. Raises ParameterError."""
        if tunes:
            finetuning.check_text(self.workspace, self.params.dataset)
        wanted = self.params.dataset or preparation.DEFAULT_DATASET
        if "/" not in wanted:
            return self._find_named_dataset(wanted, contents)
        if tunes:
            return wanted, False

        checks.check_inside(self.workspace, "dataset", wanted, kinds=("folder",))
        if self.workspace.locate(f"{wanted}/dataset.json").kind != "file":
            prepare = Command("prepare", {}, (wanted,))
            raise ParameterError("dataset", f"{wanted} has no dataset.json", remedy=prepare)
        return wanted, False

    def _find_named_dataset(self, name: str, contents: Contents) -> tuple[str, bool]:
        if name in contents.datasets:
            return contents.datasets[name], False
        place = self.workspace.datasets
        if name == preparation.DEFAULT_DATASET:
            return str(place / name), True
        known = ", ".join(sorted(contents.datasets)[:10]) or "none yet"
        text = f"no dataset {name!r} in {place}; there are: {known}; make it"
        prepare = Command("prepare", {"name": name}, ("PATH",))
        raise ParameterError("dataset", text, remedy=prepare)


class UserProgram(Workload):
    """A script, module or command of the user's, which runs as torchrun would run it."""

    kind = "script"

    @property
    def label(self) -> str:
        """The script's name, or the function's."""
        return label_of_function(self.params) or checks.label(self.params.workload)

    def check_place(self, *, takes_any_script: bool) -> None:
        """Check that the program can be read, and that its ranks can start in the wanted folder.

        With `takes_any_script` a script that is copied may lie anywhere. Raises ParameterError.
        """
        params = self.params
        if params.launcher == "node" and params.ranks_per_node:
            text = "launcher=node starts one process on each node; omit one of them"
            raise ParameterError("ranks-per-node", text)
        if not params.snapshot and not params.function:
            self._check_shared()
        if params.script:
            self._check_script(takes_any_script=takes_any_script)
        elif params.is_command:
            self._check_command()

    def _check_script(self, *, takes_any_script: bool) -> None:
        path = self.params.script
        located = self.workspace.locate(path)
        if located.kind == "absent":
            close = self.workspace.do(_close_to, path=path)
            if close:
                text = f"{path} does not exist; did you mean {close[0]}?"
                raise ParameterError("workload", text)
        if self.params.snapshot and takes_any_script:
            checks.check_readable("workload", path, located, ("file",))
        else:  # it runs in place, or an operator names another account's file
            checks.check_inside(self.workspace, "workload", path, kinds=("file",))

    def _check_command(self) -> None:
        """Raise ParameterError for a command's name that looks like a mistyped file or workload."""
        params = self.params
        path = f"{params.typed_in}/{params.workload}"
        close = self.workspace.do(_close_to, path=path, cutoff=_LIKE_A_COMMAND)
        if close and params.launcher == "torchrun":
            text = f"{params.workload} is not a file here; did you mean {close[0]}?"
            raise ParameterError("workload", text)

    def _check_shared(self) -> None:
        """Raise ParameterError unless the nodes share the script and the folder of its ranks."""
        shared = str(self.workspace.path)
        places = [copies.in_place(self.params).folder]
        if self.params.script:
            places.insert(0, self.params.script)
        for place in places:
            if place != shared and not self.workspace.locate(place).is_inside:
                text = f"{place} is outside the workspace {shared}"
                text += ", and only that is known to be shared by the nodes"
                text += "; work in a folder below it, or omit --no-snapshot"
                raise ParameterError("snapshot", text)

    def check_again(self, run: str) -> None:
        """A user's program may always go on in its folder."""

    def check(self, case: Case, run: RunName) -> None:
        """Check that the program compiles, and remark on likely failures. Raises ParameterError."""
        params = self.params
        notes = case.notes
        goes_on = run.is_again and not run.remark
        if goes_on and not self.workspace.has_checkpoint(run.name):
            text = f"{run.name} has no checkpoint of ddptrain.resume"
            notes.remark(f"{text}: its program starts at its beginning")
        notes.remark(*program_source.check(self.workspace, params, case.contents))
        notes.add(f"workload: {params.workload} {self._kind_of_program}")
        self._refuse_profile()
        if params.metric:
            names = ", ".join(name for name, _ in fields.metrics(params.metric))
            notes.add(f"metric: {names} in the output of rank 0")

    @property
    def _kind_of_program(self) -> str:
        if self.params.script:
            return "is readable"
        return "is a module" if self.params.module else "is a command of the environment"

    def options_of(self, choice: payload_arguments.Choice) -> list[str]:
        """Format options as --name=value, which argparse, click, absl and nanoGPT understand."""
        return [f"--{name}={value}" for name, value in choice.items()]

    def program(self) -> scripts.Program:
        """Build the command: the script in its copy, or in place."""
        params = self.params
        kept = self.kept
        start: copies.Start | None = None  # of a function without a project: the run's folder
        if kept is not None:
            start = kept.start
        elif not params.function:
            start = copies.in_place(params)
        words: list[str | spec.Word] = []
        if params.module:
            words = ["--module", params.workload]
        elif kept is None or params.is_command:
            words = [params.workload]
        else:
            words = [kept.script]
        return scripts.Program(
            (*words, *params.words),
            leaves_outcome=False,
            payload=self.stored_payload,
            start=start,
        )


def label_of_function(params: models.Training) -> str:
    """Return the first part of a run's name, by the file with its function; "" without one."""
    return checks.label(params.function.removesuffix(".pkl")) if params.function else ""


_KINDS: dict[str, type[Payload]] = {"gpt": Gpt, "smoke": Smoke}


def of(settings: Settings, params: models.Training, *, resume: str = "auto") -> Workload:
    """Return the workload that the options name."""
    kind = _KINDS.get(params.workload, UserProgram)
    needs_payload = params.container_image or params.own_python
    return kind(
        settings.workspace,
        settings.payload,
        params,
        resume,
        stored_payload=store.Store(settings).payload_folder() if needs_payload else "",
        has_transformers=settings.transformers,
    )


def _check_profile_options(params: models.Training) -> None:
    """Raise ParameterError for options of a profile that is not asked for."""
    if params.profile:
        return
    if params.profile_ranks != "0":
        raise ParameterError("profile-ranks", "needs profile=torch")
    if params.profile_steps:
        raise ParameterError("profile-steps", "needs profile=torch")


def _close_to(path: str, cutoff: float = 0.6) -> list[str]:
    """Return the file's or workload's name that is most like a mistyped path."""
    wanted = pathlib.Path(path)
    with contextlib.suppress(OSError):
        names = [*(one.name for one in wanted.parent.iterdir()), *BUILT_IN]
        return difflib.get_close_matches(wanted.name, names, 1, cutoff)
    return []
