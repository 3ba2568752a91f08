"""The table of all commands: a command is one line here and one file. Imports nothing."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command of `rollcall`."""

    module: str  # in `rollcall`; its `main(argv)` runs the command and returns the exit code
    meaning: str  # the line of `rollcall --help`
    by_people: bool = True  # whether people type the command; job scripts run the others


TRAIN = {
    "plan": Command("tools.plan.command", "plan a run: layouts, memory, time, cost"),
    "explain": Command("config.explain", "show every key's value and where it comes from"),
    "verify": Command("train.exact.verify", "prove that two ways to train are equal"),
    "tokenize": Command("train.data.tokenize", "write text as token files for training"),
    "predict": Command("train.inference.predict", "write a trained model's outputs"),
    "generate": Command("train.inference.generate", "continue a text with a trained model"),
    "checkpoint": Command("train.checkpoint.tools.command", "list, verify and export checkpoints"),
}
"""Commands about models and checkpoints, also as `python -m train COMMAND`."""

LAUNCH = {
    "submit": Command("launch.submission.command", "start a run on Slurm or on this machine"),
    "status": Command("launch.commands.status", "show the state of runs in one table"),
    "watch": Command("launch.commands.watch", "show a run, or that table, live"),
    "report": Command("tools.report.command", "write a report of runs as one HTML file"),
    "compare": Command("tools.report.compare", "show what differs between runs"),
    "dashboard": Command("tools.report.dashboard", "serve live reports on this machine"),
    "logs": Command("launch.commands.logs", "show the output of ranks"),
    "goodput": Command("launch.commands.goodput", "show what became of a run's time"),
    "why": Command("launch.commands.why", "explain why a run failed"),
    "stacks": Command("launch.commands.stacks", "show the Python stack of every rank"),
    "profile": Command(
        "launch.commands.profile", "profile a few steps of a live run, without a restart"
    ),
    "attach": Command("launch.commands.attach", "run a command on a node of a live run"),
    "cancel": Command("launch.commands.cancel", "save and end a run's jobs"),
    "requeue": Command("launch.commands.requeue", "start a run's job again"),
    "sweep": Command("launch.sweep.sweep", "submit many runs from one file"),
    "drill": Command("tools.drill.drill", "inject a fault into a live run"),
    "doctor": Command("launch.doctor.command", "check this machine before it trains"),
    "network": Command("launch.commands.network", "measure the network between nodes"),
    "accept": Command("tools.accept.command", "check a machine or allocation; write one page"),
    "nodes": Command("launch.commands.nodes", "list the nodes that failed in your jobs"),
    "lint": Command("tools.lint", "find mistakes in sbatch scripts"),
    "batch": Command("launch.batch.batch", "start a job's step and requeue the job", False),
    "remote": Command("launch.remote.ssh", "run a command on another machine", False),
    "array": Command("launch.sweep.local", "run an array on this machine", False),
    "supervise": Command("launch.node.supervise", "run one node's part of a run", False),
}
"""Commands about runs, also as `python -m launch COMMAND`."""

COMMANDS = {
    "train": Command("train.main", "train a model, in this process or under torchrun"),
    **LAUNCH,
    **TRAIN,
    "bench": Command("tools.bench.__main__", "measure, and print tables: speed-up, overhead, …"),
}
