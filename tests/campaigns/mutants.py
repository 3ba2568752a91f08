"""Change the launcher's decisions one at a time, and look whether tests or the simulator notice.

    PYTHONPATH=.:tests/simulation nice python tests/campaigns/mutants.py --count 80

Each mutant is a copy of the checkout with one change in a module that decides: a condition
inverted, a bound or a part of a condition removed, two statements or rows of a table swapped.
Against each run the unit tests of these modules, then the seeds that once broke an invariant, then
others. What nobody notices has survived, and is printed as a difference. The exit code is 1 below --goal.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = ("runs/decision", "runs/restarts", "node/heartbeat", "node/monitor", "node/supervise")
MODULES += ("node/rendezvous", "node/batch_process", "batch/batch", "batch/placement")
UNIT = ("node/test_heartbeat.py", "node/test_restart_rules.py", "runs/test_decision.py")
UNIT += ("batch",)
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
}
OPPOSITE |= {new: old for old, new in OPPOSITE.items()}
TOLD = {"_say", "print", "_show", "show_rest"}
"""Functions that only tell; a call that moves between others is no other decision."""
EQUIVALENT: dict[str, str] = {}
"""Mutants that change nothing that anybody could see, by the first changed line; and why."""
TIMEOUT = 300.0


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


def mutants(module: str) -> Iterator[Mutant]:
    """Yield all mutants of a module of rollcall/launch."""
    tree = ast.parse((ROOT / "rollcall" / "launch" / f"{module}.py").read_text())
    before = ast.unparse(tree)
    for place, node in enumerate(ast.walk(tree)):
        for how, change in changes(node):
            other = copy.deepcopy(tree)
            changed = next(one for at, one in enumerate(ast.walk(other)) if at == place)
            change(changed)
            after = ast.unparse(other)
            if after != before:
                yield Mutant(module, how, getattr(node, "lineno", 0), before, after)


def changes(node: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield the changes of a node: what it is, and a function that makes it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
        yield "a condition inverted", _invert
    elif isinstance(node, ast.BoolOp):
        for at in range(len(node.values)):
            yield "a part of a condition removed", lambda one, at=at: one.values.pop(at)
    elif isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Constant):
        yield "a condition inverted", _negate
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("min", "max") and len(node.args) == 2:
            for at in (0, 1):
                yield "a bound removed", lambda one, at=at: _keep(one, at)
    elif isinstance(node, ast.Tuple) and len(node.elts) > 5 and isinstance(node.elts[0], ast.Call):
        for at in range(len(node.elts) - 1):
            yield "two rows swapped", lambda one, at=at: _swap(one.elts, at)
    body = getattr(node, "body", None)
    if isinstance(node, ast.FunctionDef | ast.If | ast.While | ast.For) and isinstance(body, list):
        for at in range(len(body) - 1):
            if all(isinstance(one, ast.Expr | ast.Assign | ast.AugAssign) for one in body[at:][:2]):
                calls = [one.value for one in body[at:][:2] if isinstance(one, ast.Expr)]
                if calls and not any(_only_tells(one) for one in calls):
                    yield "two statements swapped", lambda one, at=at: _swap(one.body, at)


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


def _keep(node: ast.Call, at: int) -> None:
    node.args = [node.args[at]]
    node.func = ast.Name("(lambda value: value)", ast.Load())


def _swap(parts: list[ast.stmt] | list[ast.expr], at: int) -> None:
    parts[at], parts[at + 1] = parts[at + 1], parts[at]  # type: ignore[call-overload]


def chosen(count: int, seed: int) -> list[Mutant]:
    """Choose mutants, of each module the same share of what it has."""
    every = [mutant for module in MODULES for mutant in mutants(module)]
    return sorted(
        random.Random(seed).sample(every, min(count, len(every))),
        key=lambda mutant: (mutant.module, mutant.line),
    )


def killer(copied: Path, seeds: int) -> str:
    """Return who notices that the copy is not what it should be; empty if nobody does."""
    env = {**os.environ, "PYTHONPATH": f"{copied}:{copied}/tests/simulation"}
    env.pop("ROLLCALL_CHECKOUT", None)
    units = [f"tests/unit/launch/{part}" for part in UNIT]
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "--costs=0", "-p", "no:cacheprovider"]
    kept = "tests/simulation/test_simulation.py"
    simulate = [sys.executable, "tests/campaigns/simulate.py", "--stop", "--nodes", "2-6"]
    for who, words in (
        ("unit tests", [*pytest, *units]),
        ("named seeds", [*pytest, kept, "-k", "mended"]),
        (f"{seeds} seeds", [*simulate, "--first", "0", "--seeds", str(seeds)]),
    ):
        try:
            done = subprocess.run(
                words, cwd=copied, env=env, capture_output=True, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{who} (it hangs)"
        if done.returncode:
            return who
    return ""


def main(argv: Sequence[str]) -> int:
    """Try the mutants; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=80, metavar="N")
    parser.add_argument("--seed", type=int, default=1, help="chooses the mutants")
    parser.add_argument("--seeds", type=int, default=100, help="of the simulator", metavar="N")
    parser.add_argument("--goal", type=float, default=0.95)
    parser.add_argument("--only", help="mutants of modules with this in their name")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, "checkout")
        left_out = shutil.ignore_patterns(".git", "runs", "datasets", "__pycache__", ".*cache")
        shutil.copytree(ROOT, copied, ignore=left_out, symlinks=True)
        if who := killer(copied, 20):
            print(f"mutants: without a change, {who} fail already", file=sys.stderr)
            return 2
        killed, survivors, began = Counter[str](), list[Mutant](), time.monotonic()
        for mutant in chosen(options.count, options.seed):
            if options.only and options.only not in mutant.module:
                continue
            if any(line[1:].strip() in EQUIVALENT for line in mutant.changed):
                continue
            path = copied / "rollcall" / "launch" / f"{mutant.module}.py"
            original = path.read_text()
            path.write_text(mutant.after)
            who = killer(copied, options.seeds)
            path.write_text(original)
            print(f"{who or 'SURVIVED'}: {mutant}", flush=True)
            if who:
                killed[who] += 1
            else:
                survivors.append(mutant)
    total = killed.total() + len(survivors)
    share = killed.total() / max(1, total)
    by = ", ".join(f"{count} by {who}" for who, count in killed.most_common())
    took = time.monotonic() - began
    print(f"{total} mutants in {took:.0f} s: {killed.total()} killed ({by}), {share:.0%}")
    return int(share < options.goal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
