"""How often is it worth saving? The interval of Young and Daly. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def best(cost: float, between_failures: float) -> float:
    """Seconds between saves that lose the least to saving and to steps done again.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
    https://doi.org/10.1016/j.future.2004.11.016 (equation 37); its first term is that of
    J. W. Young, https://doi.org/10.1145/361147.361115.

    Args:
        cost: seconds of training that a save costs.
        between_failures: mean seconds between failures.
    """
    ratio = cost / (2 * between_failures)
    if ratio >= 1:
        return between_failures
    first = math.sqrt(2 * cost * between_failures)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def between_failures(events: Iterable[dict[str, Any]], assumed: float) -> float:
    """Mean seconds between failures of a run: what was assumed, corrected by what happened.

    The assumption counts as one failure after that time. An attempt that did not finish failed;
    how long it had run is known from its last event.

    Args:
        events: those of the run so far, of attempts that have all ended.
        assumed: seconds.
    """
    failures, seconds, started, last, ended = 0, 0.0, None, 0.0, True
    for line in events:
        if line["event"] == "started":
            if started is not None:
                seconds += max(0.0, last - started)  # the clock may have been set back
                failures += not ended
            started, ended = line["time"], False
        ended = ended or line["event"] == "finished"
        last = line["time"]
    if started is not None:
        seconds += max(0.0, last - started)
        failures += not ended
    return (assumed + seconds) / (1 + failures)
