"""What must all ranks know of a step? The sums that its one small collective makes."""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """One step over all ranks, equal on each of them; in this order the numbers are sent.

    The first three are computed on the device and may still be on their way there. A fingerprint of
    the weights of every rank and the seconds that it computed come before them, and what a save in
    flight must know after the last.

    Attributes:
        loss: the sum of the weighted losses.
        grad_norm: of the whole gradient before it was clipped.
        skipped: one if the weights stayed as they were.
        waited: seconds for data, as a mean over the ranks.
        unreadable: samples that could not be read so far.
        exhausted: how many ranks had no memory left.
        by_person, by_scheduler: how many ranks were asked to stop.
    """

    loss: float
    grad_norm: float
    skipped: float
    waited: float
    unreadable: float
    exhausted: float
    by_person: float
    by_scheduler: float
