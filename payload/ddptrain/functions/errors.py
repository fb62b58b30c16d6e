"""The errors of a function's job."""


class FunctionError(Exception):
    """A job was not submitted, or its files cannot be used; one line."""


class UncompletedJobError(RuntimeError):
    """The job ended without a result: it was cancelled, killed, or never started."""


class FailedJobError(UncompletedJobError):
    """A rank failed without an exception of the function, or with one that cannot be loaded."""


class RankTraceback(Exception):
    """The traceback of a rank, which is the cause of its exception here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'
