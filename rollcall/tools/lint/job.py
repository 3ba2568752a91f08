"""The nodes, tasks and GPUs on which a command of a script runs, as far as the directives say."""

import contextlib
import math
import re
from dataclasses import dataclass

from rollcall.launch.scheduler import gpus
from rollcall.tools.lint.model import Launch, Training
from rollcall.tools.lint.script import Script


def number(text: str) -> int | None:
    """Return a number; None for a variable and everything else that only the job knows."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


_REPEATS = re.compile(r"\$\{?SLURM_\w+\}?$")


@dataclass(frozen=True)
class Job:
    """The resources of a step, or of the whole job without a `launch`."""

    script: Script
    launch: Launch | None = None

    @property
    def _step(self) -> dict[str, str]:
        options = (self.launch.step if self.launch else None) or {}
        # --nodes=$SLURM_NNODES repeats the directive.
        return {name: value for name, value in options.items() if not _REPEATS.match(value)}

    def _value(self, name: str) -> str:
        return self._step.get(name) or self.script.value(name)

    @property
    def nodes(self) -> int:
        """The fewest nodes that it runs on; 0 if only the job knows."""
        if "$" in self._step:
            return 0
        given = re.match(r"\d+", self._value("nodes"))
        return (number(given[0]) or 0) if given else 0

    @property
    def tasks_per_node(self) -> int | None:
        """The tasks on each node; None if only the job knows."""
        if "$" in self._step:
            return None
        per_node = self._step.get("ntasks-per-node")
        if per_node is None and "ntasks" not in self._step:
            per_node = self.script.value("ntasks-per-node") or self.script.value("tasks-per-node")
        if per_node:
            return number(per_node)
        tasks = number(self._step.get("ntasks") or self.script.value("ntasks"))
        given = self._step.get("nodes") or self.script.value("nodes")
        count = number(given or ("1" if "ntasks" in self._step else ""))
        return math.ceil(tasks / count) if tasks and count else None

    @property
    def gpus_per_node(self) -> int | None:
        """The GPUs on each node; None without GPUs and if only the job knows."""
        names = ("gpus-per-node", "gres", "gpus", "gpus-per-task")
        given = {name: self.script.value(name) for name in names} | {
            name: value for name, value in self._step.items() if name in names
        }
        with contextlib.suppress(ValueError):  # a variable
            count = sum(gpus.per_node(given["gpus-per-node"], {"gres": given["gres"]}).values())
            if count:
                return count
            if given["gpus"] and (self.nodes or given["gpus"] == "1"):
                return sum(gpus.of_option(given["gpus"]).values()) // max(self.nodes, 1) or None
            if given["gpus-per-task"] and self.tasks_per_node:
                return sum(gpus.of_option(given["gpus-per-task"]).values()) * self.tasks_per_node
        return None

    @property
    def takes_whole_nodes(self) -> bool:
        """True if no other job can run on the nodes, at least on most clusters."""
        on_node = self.gpus_per_node or 0
        numbers = (number(self.script.value(name)) for name in ("ntasks-per-node", "cpus-per-task"))
        cpus = math.prod(filter(None, numbers))
        is_all = self.script.option("exclusive") is not None or self.script.value("mem") == "0"
        return is_all or on_node >= 8 or (on_node >= 4 and cpus >= 32)

    def ranks_per_node(self, training: Training) -> int | None:
        """Return the ranks that a launcher is told to start on each node."""
        total = self.evaluate(training.option("num-processes") or "")
        if training.name == "accelerate":
            machines = self.evaluate(training.option("num-machines") or "1")
            return total // machines if total and machines else None
        return self.evaluate(training.option("nproc-per-node", "num-gpus") or "")

    def evaluate(self, text: str) -> int | None:
        """Return the value of a number, of Slurm's variables and of products of these."""
        tasks, nodes = self.tasks_per_node, self.nodes or None
        known = {
            "SLURM_NNODES": nodes,
            "SLURM_JOB_NUM_NODES": nodes,
            "SLURM_NTASKS_PER_NODE": tasks,
            "SLURM_NTASKS": tasks * nodes if tasks and nodes else None,
            "SLURM_GPUS_ON_NODE": self.gpus_per_node,
            "SLURM_GPUS_PER_NODE": self.gpus_per_node,
        }
        product = text.replace("$((", "").replace("))", "")
        factors = [factor.strip(" \"'${}()") for factor in product.split("*")]
        values = [known[factor] if factor in known else number(factor) for factor in factors]
        return None if None in values else math.prod(value or 0 for value in values)
