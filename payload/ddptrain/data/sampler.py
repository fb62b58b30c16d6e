"""The sequences of each step: a pure function of seed, pass and step, for any number of ranks.

The tokens are cut into rows of T tokens, the rows into windows that are read in one go. A pass over
the data permutes the windows, and the rows inside each: that is one long stream of rows. It is cut
into L equal lanes; a step takes the next B/L rows of every lane, B being the global batch. So a
lane reads windows one after the other, a batch mixes L distant places, and there is nothing to save
but the step: resuming costs the same at step 10 and at step 10 000 000.

Rank r of W takes samples [r B/W, (r+1) B/W) of the step. Every W that divides B sees the same
samples in the same steps.
"""

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from ddptrain.data import shards
from ddptrain.ground import errors

MAX_LANES = 64
ROWS_PER_LANE = (
    16  # of a step, beyond that many lanes: ranks that share a lane each read its windows whole
)
MAX_WINDOW_TOKENS = 2 << 20  # 4 MiB of 16-bit tokens: a JuiceFS block, a Lustre stripe

Rows = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The order of a dataset's rows. It is part of a checkpoint: another plan is another order."""

    seed: int
    seq_len: int
    global_batch: int  # B, in sequences
    lanes: int
    window_rows: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive rows of a lane that lie in one window."""

    window: int
    rows: Rows  # row numbers inside the window, in the order of their use


@dataclasses.dataclass(frozen=True)
class Strip:
    """A lane's part of a rank's share over some steps: `width` samples a step, at `column`."""

    column: int
    width: int
    pieces: list[Piece]


def make_plan(seed: int, seq_len: int, global_batch: int, tokens: int) -> Plan:
    """Return the plan for a dataset of so many tokens."""
    most = max(min(MAX_LANES, global_batch), global_batch // ROWS_PER_LANE)
    divisors = [d for d in range(1, most + 1) if global_batch % d == 0]
    lanes = max(divisors)
    window_tokens = max(64 * seq_len, tokens // (4 * lanes))
    window_tokens = min(MAX_WINDOW_TOKENS, window_tokens)
    window = max(1, window_tokens // seq_len)
    return Plan(seed, seq_len, global_batch, lanes, window)


class Sampler:
    """Finds the rows of any step of any pass."""

    def __init__(self, plan: Plan, split: tuple[shards.Shard, ...]) -> None:
        self.plan = plan
        shard_ids: list[int] = []
        first_rows: list[int] = []
        counts: list[int] = []
        for number, shard in enumerate(split):
            total = (
                max(0, shard.tokens - 1) // plan.seq_len
            )  # a row needs one token more than it is long
            for first in range(0, total, plan.window_rows):
                shard_ids.append(number)
                first_rows.append(first)
                counts.append(min(plan.window_rows, total - first))
        self.window_shard = np.array(shard_ids, dtype=np.int64)
        self.window_first_row = np.array(first_rows, dtype=np.int64)
        self.window_rows = np.array(counts, dtype=np.int64)
        self.rows = int(self.window_rows.sum())
        self.rows_per_lane_step = plan.global_batch // plan.lanes
        self.steps_per_pass = self.rows // plan.lanes // self.rows_per_lane_step
        if not self.steps_per_pass:
            what = f"the training split has {self.rows} sequences of {plan.seq_len} tokens"
            remedy = "lower --batch, --grad-accum or --seq-len, or prepare more text"
            raise errors.UserError(f"{what}, one step takes {plan.global_batch}: {remedy}")

    def block(self, step: int, count: int, first: int, last: int) -> list[Strip]:
        """Return the places of samples [first, last) of steps [step, step + count) in one pass."""
        pass_number, begin = divmod(step, self.steps_per_pass)
        assert begin + count <= self.steps_per_pass
        found: list[Strip] = []
        k = self.rows_per_lane_step
        steps = np.arange(count)[:, None]
        for lane in range(first // k, (last - 1) // k + 1):
            low = max(0, first - lane * k)
            high = min(k, last - lane * k)
            start = lane * (self.rows // self.plan.lanes) + begin * k
            places = start + steps * k + np.arange(low, high)  # in the pass's stream of rows
            pieces = self._pieces(pass_number, places.ravel())
            found.append(Strip(lane * k + low - first, high - low, pieces))
        return found

    def _pieces(self, pass_number: int, places: Rows) -> list[Piece]:
        """Return the rows at increasing places of the pass's stream, one piece for each window."""
        order, starts = self._order(pass_number)
        slots = np.searchsorted(starts, places, side="right") - 1
        found: list[Piece] = []
        for slot in range(int(slots[0]), int(slots[-1]) + 1):
            window = int(order[slot])
            inside = (
                places[np.searchsorted(slots, slot) : np.searchsorted(slots, slot, side="right")]
                - starts[slot]
            )
            if inside.size:
                found.append(Piece(window, self._inside(pass_number, window)[inside]))
        return found

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a sampler lives as long as the process
    def _order(self, pass_number: int) -> tuple[Rows, Rows]:
        order = np.random.default_rng([self.plan.seed, pass_number]).permutation(
            len(self.window_rows)
        )
        counts = self.window_rows[order]
        return order, np.cumsum(counts) - counts

    @functools.lru_cache(maxsize=256)  # noqa: B019
    def _inside(self, pass_number: int, window: int) -> Rows:
        return np.random.default_rng([self.plan.seed, pass_number, window]).permutation(
            int(self.window_rows[window])
        )
