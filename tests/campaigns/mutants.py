"""Change the launcher's decisions one at a time, and look whether tests or the simulator notice.

    PYTHONPATH=.:tests/simulation nice python tests/campaigns/mutants.py --count 80

Each mutant is a copy of the checkout with one change in a module that decides: a condition
inverted, a bound or a part of a condition removed, two statements or rows of a table swapped.
Against each run the seeds of the simulator that once broke an invariant, then others, then the unit
tests of the module. A mutant that nobody notices
has survived, and is printed as a difference. The exit code
is 1 below --goal.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODULES: tuple[str, ...] = (
    "runs/decision",
    "runs/restarts",
    "node/heartbeat",
    "node/monitor",
    "node/supervise",
)
MODULES += ("node/rendezvous", "node/batch_process", "batch/batch", "batch/placement")
UNIT = {
    "runs/decision": ["runs/test_decision.py"],
    "runs/restarts": ["batch/test_requeue.py"],
    "node/heartbeat": ["node/test_heartbeat.py", "-k", "not 10000"],
    "batch/batch": ["batch/test_requeue.py"],
    "batch/placement": ["batch/test_placement.py"],
}
"""The unit tests of a module; the largest jobs take most of their time, and show nothing else."""
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
}
OPPOSITE |= {new: old for old, new in OPPOSITE.items()}
TOLD = {"_say", "print", "_show", "show_rest"}
"""Functions that only print; their order decides nothing."""
EQUIVALENT = {
    "if is_replaced:": "the table has one row for it, which stands aside",
}
"""Mutants that change nothing that anybody could see, by a changed line; and why."""
TIMEOUT, CPU = 300.0, 60
"""Seconds of the clock and of a processor, after which tests or a simulation hang."""


class Mutant:
    """One change of a module; the text before and after it."""

    def __init__(self, module: str, how: str, line: int, before: str, after: str) -> None:
        self.module, self.how, self.line = module, how, line
        self.before, self.after = before, after

    @property
    def changed(self) -> list[str]:
        """The changed lines, as a difference."""
        both = self.before.splitlines(), self.after.splitlines()
        lines = difflib.unified_diff(*both, lineterm="", n=0)
        return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]

    def __str__(self) -> str:
        return "\n".join([f"{self.module}.py, line {self.line}: {self.how}", *self.changed])


def places(module: str) -> Iterator[tuple[str, int, int]]:
    """Yield where a module can change: the module, a node of its tree, a change of the node."""
    for at, node in enumerate(ast.walk(_tree(module))):
        yield from ((module, at, number) for number, _ in enumerate(changes(node)))


def mutant(module: str, at: int, number: int) -> Mutant:
    """Make the mutant of a place."""
    tree = _tree(module)
    before, node = ast.unparse(tree), list(ast.walk(tree))[at]
    how, change = list(changes(node))[number]
    line = getattr(node, "lineno", 0)
    change(node)
    return Mutant(module, how, line, before, ast.unparse(tree))


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / "rollcall" / "launch" / f"{module}.py").read_text())


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """Yield the changes of a node: what it is, and a function that makes it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
        yield "a condition inverted", _invert
    elif isinstance(node, ast.BoolOp):
        for at in range(len(node.values)):
            yield "a part of a condition removed", partial(_remove, at)
    elif isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Constant):
        yield "a condition inverted", _negate
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("min", "max") and len(node.args) == 2:
            for at in (0, 1):
                yield "a bound removed", partial(_keep, at)
    elif isinstance(node, ast.Tuple) and len(node.elts) > 5 and isinstance(node.elts[0], ast.Call):
        for at in range(len(node.elts) - 1):
            yield "two rows swapped", partial(_swap, "elts", at)
    body = getattr(node, "body", None)
    if isinstance(node, ast.FunctionDef | ast.If | ast.While | ast.For) and isinstance(body, list):
        for at in range(len(body) - 1):
            if all(isinstance(one, ast.Expr | ast.Assign | ast.AugAssign) for one in body[at:][:2]):
                calls = [one.value for one in body[at:][:2] if isinstance(one, ast.Expr)]
                if calls and not any(_only_tells(one) for one in calls):
                    yield "two statements swapped", partial(_swap, "body", at)


def _only_tells(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):  # a docstring
        return True
    name = getattr(
        getattr(value, "func", None), "id", getattr(getattr(value, "func", None), "attr", "")
    )
    return name in TOLD


def _invert(node: ast.Compare) -> None:
    node.ops[0] = OPPOSITE[type(node.ops[0])]()


def _negate(node: ast.If | ast.While) -> None:
    node.test = ast.UnaryOp(ast.Not(), node.test)


def _remove(at: int, node: ast.BoolOp) -> None:
    node.values.pop(at)


def _keep(at: int, node: ast.Call) -> None:
    node.args = [node.args[at]]
    node.func = ast.Name("(lambda value: value)", ast.Load())


def _swap(field: str, at: int, node: ast.AST) -> None:
    parts = getattr(node, field)
    parts[at], parts[at + 1] = parts[at + 1], parts[at]


def chosen(count: int, seed: int) -> list[Mutant]:
    """Choose mutants at random, in the order of their modules."""
    every = [place for module in MODULES for place in places(module)]
    return [mutant(*place) for place in sorted(random.Random(seed).sample(every, count))]


def killer(copied: Path, module: str, seeds: int) -> str:
    """Return who notices that the copy is not what it should be; empty if nobody does."""
    env = {**os.environ, "PYTHONPATH": f"{copied}:{copied}/tests/simulation"}
    env.pop("ROLLCALL_CHECKOUT", None)
    ways = {"the simulator": [sys.executable, __file__, f"--trial={seeds}"]}
    if units := UNIT.get(module):
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "--costs=0", "-p", "no:cacheprovider"]
        ways["unit tests"] = [*pytest, f"tests/unit/launch/{units[0]}", *units[1:]]
    for who, words in ways.items():
        try:
            done = subprocess.run(
                words, cwd=copied, env=env, capture_output=True, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{who} (hangs)"
        if done.returncode:
            (copied / "killed.txt").write_bytes(done.stdout + done.stderr)
            return f"{who} (hangs)" if done.returncode == -signal.SIGXCPU else who
    return ""


def trial(seeds: int) -> int:
    """Simulate the seeds that are kept, and others; return 1 if an invariant breaks."""
    import test_simulation
    from simulation import simulate

    resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU + 10))
    every = [*((seed, 2, 5) for seed in test_simulation.KEPT)]
    every += [(seed, 2, 6) for seed in test_simulation.OF_SIX]
    every += [(seed, 2, 4) for seed in range(seeds)]
    for seed in every:
        if broken := simulate(*seed).broken:
            print(seed, *broken, sep="\n")
            return 1
    return 0


def main(argv: Sequence[str]) -> int:
    """Try the mutants; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=80, metavar="N")
    parser.add_argument("--seed", type=int, default=1, help="chooses the mutants")
    parser.add_argument("--seeds", type=int, default=100, help="of the simulator", metavar="N")
    parser.add_argument("--goal", type=float, default=0.95)
    parser.add_argument("--trial", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", help="mutants of modules with this in their name")
    options = parser.parse_args(argv)
    if options.trial is not None:
        return trial(options.trial)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, "checkout")
        for part in ROOT.iterdir():
            if part.is_dir() and part.name not in (".git", "runs", "datasets"):
                shutil.copytree(part, copied / part.name, symlinks=True)
            elif part.is_file():
                copied.mkdir(exist_ok=True)
                shutil.copy(part, copied)
        if who := killer(copied, "runs/decision", 0):
            print(f"mutants: without a change, it fails already: {who}", file=sys.stderr)
            print((copied / "killed.txt").read_text(errors="replace"), file=sys.stderr)
            return 2
        killed, survivors, began = Counter[str](), list[Mutant](), time.monotonic()
        for one in chosen(options.count, options.seed):
            if options.only and options.only not in one.module:
                continue
            if any(line[1:].strip() in EQUIVALENT for line in one.changed):
                continue
            path = copied / "rollcall" / "launch" / f"{one.module}.py"
            original = path.read_text()
            path.write_text(one.after)
            who = killer(copied, one.module, options.seeds)
            path.write_text(original)
            print(f"{who or 'SURVIVED'}: {one}", flush=True)
            if who:
                killed[who] += 1
            else:
                survivors.append(one)
    total = killed.total() + len(survivors)
    share = killed.total() / max(1, total)
    by = ", ".join(f"{count} by {who}" for who, count in killed.most_common())
    took = time.monotonic() - began
    print(f"{total} mutants in {took:.0f} s: {killed.total()} killed ({by}), {share:.0%}")
    return int(share < options.goal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
