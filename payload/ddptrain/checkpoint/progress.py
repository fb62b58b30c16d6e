"""A training's progress: part of each checkpoint."""

import dataclasses


@dataclasses.dataclass
class Progress:
    """Steps, tokens and losses so far."""

    step: int = 0
    tokens: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    val_loss: float | None = None
    best_loss: float | None = None
    best_step: int | None = None

    def advance(self, step: int, tokens: int, loss: float | None) -> None:
        """Count a step; `loss` is None if it had nothing to learn."""
        self.step = step
        self.tokens += tokens
        if loss is not None:
            self.last_loss = loss
            if self.first_loss is None:
                self.first_loss = loss

    def evaluate(self, step: int, val_loss: float | None) -> bool:
        """Take the validation loss after a step, and return whether it is the best so far."""
        self.val_loss = val_loss
        if val_loss is None:
            return False
        if self.best_loss is not None and val_loss >= self.best_loss:
            return False
        self.best_loss = val_loss
        self.best_step = step
        return True
