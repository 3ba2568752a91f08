"""`rollcall bench speedup`: how much faster more ranks train, and why not in proportion.

Rows take turns to train one model on scikit-learn's digits: one device, nn.DataParallel, and each
strategy on more and more ranks. "Strong" keeps the samples of a step, "weak" those of a rank.

The serial fraction is Karp and Flatt's (https://doi.org/10.1145/78607.78614) for strong scaling,
Gustafson's (https://doi.org/10.1145/42411.42415) for weak scaling. Exposed communication is the
time of a step less that of the bare loop on ranks that train alone, side by side. Hidden
communication is the rest of the time that the messages take when nothing runs beside them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from rollcall.messages.text import duration
from rollcall.tools.bench import loops, turns
from rollcall.tools.bench.turns import BenchError, Figures, cell, column

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
    found = {name: np.array(column(each, "wall")) for name, each in measured.items()}
    for scaling in options.scaling:
        whose = "a rank" if scaling == "weak" else "a step, over all ranks"
        rows: list[Sequence[str]] = [HEAD]
        for name in alone:
            faster = cell(found[ONE] / found[name])
            rows.append((name, "1", cell(found[name], duration), faster, *[""] * 5))
        many = [_row(found, name, k, scaling) for k in counts for name in options.strategies]
        rows += [cells for cells, _ in many]
        title = f"{scaling} scaling: {one.model} on {device}, {one.batch} samples {whose}"
        turns.show(title, rows)
        print("", *(reason for _, reason in many), "", sep="\n")
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


def _row(found: Mapping[str, np.ndarray], name: str, k: int, scaling: str) -> tuple[list[str], str]:
    """Return the row of a strategy on `k` ranks, and why it is not `k` times as fast."""
    is_weak = scaling == "weak"
    step, alone = found[f"{name} {k} {scaling}"], found[f"alone {k} {scaling}"]
    ideal = found[ONE] if is_weak else found[ONE] / k
    faster = k * ideal / step
    exposed = np.maximum(0.0, step - alone)
    hidden = np.maximum(0.0, found[f"messages {name} {k}"] - exposed)
    serial = ((k - faster) if is_weak else (k / faster - 1)) / (k - 1)
    # The speed-up of double the ranks, by the law of Gustafson or Amdahl.
    part, double = np.maximum(0.0, serial), 2 * k
    weak, strong = double - part * (double - 1), 1 / (part + (1 - part) / double)
    expected = np.maximum(0.0, weak if is_weak else strong)
    cells = [
        *(name, str(k), cell(step, duration), cell(faster)),
        *(cell(faster / k, "{:.0%}".format), cell(serial, "{:.0%}".format)),
        *(cell(exposed, duration), cell(hidden, duration), cell(expected)),
    ]
    said = f"{name} on {k} ranks: {np.median(faster):.2f} times as fast"
    if np.median(faster) >= 0.97 * k:
        return cells, f"{said}, as hoped."
    small = "" if is_weak else " on smaller batches"
    parts = [
        (np.median(exposed), "for communication that nothing hides"),
        (np.median(np.maximum(0.0, alone - ideal)), f"because ranks compute side by side{small}"),
    ]
    why = ", ".join(f"{duration(taken)} {text}" for taken, text in sorted(parts, reverse=True))
    base = f"{'' if is_weak else f'1/{k} of '}the step of one device"
    longer = duration(float(np.median(step - ideal)))
    return cells, f"{said}, not {k}. A step is {longer} longer than {base}: {why}."
