"""A bar on a terminal for what takes long: one at a time, and a line for each that is done."""

import rich.console
import rich.progress
import rich.table
import rich.text

from ddp.view import tables

_BAR_CELLS = 20


class Bars:
    """The bar of the task that goes on now."""

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console
        columns = (
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.description}", markup=False, table_column=_column(3)),
            rich.progress.BarColumn(_BAR_CELLS),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.fields[detail]}", markup=False, table_column=_column(2)),
        )
        self._progress = rich.progress.Progress(
            *columns,
            console=console,
            transient=True,
            expand=True,
            refresh_per_second=5,
            redirect_stdout=False,
            redirect_stderr=False,  # Screen writes nothing else while there is a bar
        )
        self._progress.start()
        self._last: tables.Step | None = None

    def move(self, step: tables.Step) -> None:
        """Show how far a task is; another task than before ends that one."""
        if self._last is None or self._last.task != step.task:
            self._end()
            self._progress.add_task(step.task, total=step.total, completed=int(step.done), detail=step.detail)
        else:
            task = self._progress.tasks[0]
            self._progress.update(task.id, total=step.total, completed=step.done, detail=step.detail)
            if step.total is None:
                task.total = None  # update() takes None for "as it was"
        self._last = step

    def close(self) -> None:
        """End the task, and leave the terminal as it was."""
        self._end()
        self._progress.stop()

    def _end(self) -> None:
        if self._last is None:
            return
        task = self._progress.tasks[0]
        words = ", ".join(part for part in (f"{task.elapsed or 0:.0f} s", self._last.detail) if part)
        self._progress.remove_task(task.id)
        line = rich.text.Text.assemble(self._last.task, (f"  {words}", "dim"))
        self._console.print(line, soft_wrap=True)
        self._last = None


def _column(ratio: int) -> rich.table.Column:
    return rich.table.Column(no_wrap=True, overflow="ellipsis", ratio=ratio)
