"""`rollcall bench speedup`: how much faster more ranks train, and why not in proportion.

Each row trains the same model on scikit-learn's digits: one device; nn.DataParallel in one process;
each strategy of rollcall on more and more ranks. "Strong" keeps the samples of a step, "weak" those
of a rank. Every rank has the same number of threads. All rows take turns.

Speed-up is samples per second relative to one device. The serial fraction is Karp and Flatt's
(https://doi.org/10.1145/78607.78614) for strong scaling and Gustafson's
(https://doi.org/10.1145/42411.42415) for weak scaling. The last column expects from it the speed-up
of double the ranks. Exposed communication is the time of a step less the time of the bare loop on
ranks that train alone, side by side. Hidden communication is the rest of the time that the messages
of the strategy take when nothing runs beside them.
"""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rollcall.bench import loops, turns
from rollcall.bench.turns import BenchError, Figures, cell, column, ratios, seconds

ONE = "1 device"
HEAD = ("", "ranks", "step", "speed-up", "efficiency", "serial", "exposed", "hidden", "on double")


def main(argv: Sequence[str]) -> int:
    """Measure and print the tables; return the exit code."""
    words = turns.parser("speedup", __doc__)
    most = "ranks, such as 2 4 8 (default: all cores or GPUs, half of them, and so on)"
    words.add_argument("--ranks", type=turns.count, nargs="+", metavar="K", help=most)
    known = [*loops.MESSAGES]
    words.add_argument("--strategies", choices=known, nargs="+", default=known)
    kinds = ["strong", "weak"]
    words.add_argument("--scaling", choices=kinds, nargs="+", default=kinds)
    words.add_argument("--model", choices=loops.MODELS, default="cnn")
    words.add_argument("--batch", type=turns.count, help="samples of one device (default: 256)")
    words.add_argument("--steps", type=turns.count, default=60, help="steps that are timed")
    words.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs if there are any")
    options = words.parse_args(argv)
    device, there = _devices(options.device)
    counts = sorted({*(options.ranks or _halves(there))})
    units = "GPUs" if device == "cuda" else "cores"
    if there < 2:
        raise BenchError(f"a speed-up needs at least 2 {units}; this machine has {there}")
    if wrong := [count for count in counts if not 2 <= count <= there]:
        raise BenchError(
            f"{wrong[0]} ranks: expected 2 to {there}, because there are {there} {units}"
        )
    limit = loops.SAMPLES // counts[-1]
    batch = options.batch or min(256, limit)
    if not counts[-1] <= batch <= limit:
        raise BenchError(f"--batch {batch}: expected {counts[-1]} to {limit}")
    threads = max(1, there // counts[-1]) if device == "cpu" else 1
    one = loops.Settings(
        options.model, options.steps, batch=batch, threads=threads, device=device
    )._replace(warm_up=20)
    alone = {ONE: ("rollcall", one), "DataParallel": ("DataParallel", one)}
    if device == "cpu" and there > threads:
        alone[f"{ONE}, {there} threads"] = ("rollcall", one._replace(threads=there))
    ways: dict[str, Callable[[int], Figures]] = {
        name: partial(loops.measure, *way, 1) for name, way in alone.items()
    }
    for count in counts:
        for scaling in options.scaling:
            whole = one._replace(batch=batch * (count if scaling == "weak" else 1))
            ways[f"alone {count} {scaling}"] = partial(loops.measure, "alone", whole, count)
            for name in options.strategies:
                own = whole._replace(strategy=name)
                ways[f"{name} {count} {scaling}"] = partial(loops.measure, "rollcall", own, count)
        for name in options.strategies:
            own = one._replace(strategy=name)
            ways[f"messages {name} {count}"] = partial(loops.measure, "collectives", own, count)
    measured = turns.take_turns(ways, options.repeats)
    found = {name: column(each, "wall") for name, each in measured.items()}
    for scaling in options.scaling:
        whose = "a rank" if scaling == "weak" else "a step, over all ranks"
        rows: list[Sequence[str]] = [HEAD]
        for name in alone:
            faster = cell(ratios(found[ONE], found[name]))
            rows.append((name, "1", cell(found[name], seconds), faster, *[""] * 5))
        many = [_Many(found, name, k, scaling) for k in counts for name in options.strategies]
        rows += [each.cells() for each in many]
        title = f"{scaling} scaling: {one.model} on {device}, {one.batch} samples {whose}"
        turns.show(title, rows)
        print("", *(each.reason() for each in many), "", sep="\n")
    if device == "cpu":
        print(
            f"Ranks share {there} cores, their caches and their memory; threads of each rank, and "
            f"of the one device: {threads}.\nMessages take time of the same cores. DataParallel "
            "needs GPUs: on a CPU, PyTorch runs the module without any change."
        )
    return 0


def _devices(asked: str | None) -> tuple[str, int]:
    """Return the kind of device, and how many of it there are."""
    import torch  # here: --help needs none

    gpus = torch.cuda.device_count()
    device = asked or ("cuda" if gpus else "cpu")
    return device, gpus if device == "cuda" else len(os.sched_getaffinity(0))


def _halves(there: int) -> list[int]:
    """Return a count of ranks, half of it and so on, down to 2."""
    return [there, *_halves(there // 2)] if there >= 2 else []


class _Many:
    """The figures of a strategy on `k` ranks; lists have a number for each turn."""

    def __init__(self, found: Mapping[str, list[float]], name: str, k: int, scaling: str) -> None:
        self._name, self._k, self._is_weak = name, k, scaling == "weak"
        self._step = found[f"{name} {k} {scaling}"]
        one, alone = found[ONE], found[f"alone {k} {scaling}"]
        messages = found[f"messages {name} {k}"]
        ideal = [own if self._is_weak else own / k for own in one]
        self._faster = [k * ratio for ratio in ratios(ideal, self._step)]
        self._longer = [a - b for a, b in zip(self._step, ideal, strict=True)]
        self._slower = [max(0.0, a - b) for a, b in zip(alone, ideal, strict=True)]
        self._exposed = [max(0.0, a - b) for a, b in zip(self._step, alone, strict=True)]
        self._hidden = [max(0.0, a - b) for a, b in zip(messages, self._exposed, strict=True)]

    def _serial(self, faster: float) -> float:
        k = self._k
        return (k - faster) / (k - 1) if self._is_weak else (k / faster - 1) / (k - 1)

    def _expected(self, faster: float) -> float:
        """Return the speed-up of double the ranks, by the law of Gustafson or Amdahl."""
        serial, k = max(0.0, self._serial(faster)), 2 * self._k
        return k - serial * (k - 1) if self._is_weak else 1 / (serial + (1 - serial) / k)

    def cells(self) -> list[str]:
        """Return a row of the table."""
        return [
            *(self._name, str(self._k), cell(self._step, seconds), cell(self._faster)),
            cell([faster / self._k for faster in self._faster], "{:.0%}".format),
            cell([*map(self._serial, self._faster)], "{:.0%}".format),
            *(cell(self._exposed, seconds), cell(self._hidden, seconds)),
            cell([*map(self._expected, self._faster)]),
        ]

    def reason(self) -> str:
        """Say why the speed-up is not the number of ranks."""
        faster = statistics.median(self._faster)
        said = f"{self._name} on {self._k} ranks: {faster:.2f} times as fast"
        if faster >= 0.97 * self._k:
            return f"{said}, as hoped."
        small = "" if self._is_weak else " on smaller batches"
        parts = {
            "for communication that nothing hides": statistics.median(self._exposed),
            f"because ranks compute side by side{small}": statistics.median(self._slower),
        }
        why = [f"{seconds(parts[text])} {text}" for text in sorted(parts, key=lambda t: -parts[t])]
        longer = seconds(statistics.median(self._longer))
        base = f"{'' if self._is_weak else f'1/{self._k} of '}the step of one device"
        return f"{said}, not {self._k}. A step is {longer} longer than {base}: {', '.join(why)}."
