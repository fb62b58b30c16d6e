"""A progress bar on a terminal; in a log, nothing: there the marker lines say how far it is."""

import sys
import types
import typing


class Bar:
    """Counts towards a total."""

    def __init__(self, total: int, text: str, *, unit: str = "", start: int = 0, enabled: bool = True) -> None:
        self.live = enabled and sys.stderr.isatty()
        self._bar: typing.Any = None
        if self.live:
            import tqdm

            self._bar = tqdm.tqdm(
                total=total, initial=start, desc=text, unit=unit or "it", unit_scale=unit == "B", dynamic_ncols=True
            )

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int = 1, text: str = "") -> None:
        """Move on, with what to show behind the bar."""
        if self._bar is not None:
            if text:
                self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(count)
