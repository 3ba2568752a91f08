"""The table of all commands: a command is one line here and one file. Imports nothing."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command of `rollcall`."""

    module: str  # its `main(argv)` runs the command and returns the exit code
    meaning: str  # the line of `rollcall --help`
    by_people: bool = True  # whether people type the command; job scripts run the others


TRAIN = {
    "plan": Command("rollcall.train.plan", "plan a run: layouts, memory, time, cost"),
    "explain": Command("rollcall.config.explain", "show every key's value and where it comes from"),
    "verify": Command("rollcall.train.exact.verify", "prove that two ways to train are equal"),
    "matrix": Command("rollcall.train.matrix", "resume runs of each strategy under each other one"),
    "predict": Command("rollcall.train.inference.predict", "write a trained model's outputs"),
    "generate": Command(
        "rollcall.train.inference.generate", "continue a text with a trained model"
    ),
    "checkpoint": Command(
        "rollcall.train.checkpoint.tools.command", "list, verify, compare and export checkpoints"
    ),
    "replay": Command("rollcall.train.recovery.replay", "repeat a skipped step and find its cause"),
}
"""Commands about models and checkpoints, also as `python -m train COMMAND`."""

LAUNCH = {
    "submit": Command(
        "rollcall.launch.submission.command", "start a run on Slurm or on this machine"
    ),
    "status": Command("rollcall.launch.commands.status", "show the state of runs in one table"),
    "watch": Command("rollcall.launch.commands.watch", "show a run, or that table, live"),
    "report": Command("rollcall.launch.report.command", "write a report of runs as one HTML file"),
    "compare": Command("rollcall.launch.report.compare", "show what differs between runs"),
    "dashboard": Command("rollcall.launch.report.dashboard", "serve live reports on this machine"),
    "logs": Command("rollcall.launch.commands.logs", "show the output of ranks"),
    "goodput": Command("rollcall.launch.commands.goodput", "show what became of a run's time"),
    "why": Command("rollcall.launch.commands.why", "explain why a run failed"),
    "stacks": Command("rollcall.launch.commands.stacks", "show the Python stack of every rank"),
    "profile": Command(
        "rollcall.launch.commands.profile", "profile a few steps of a live run, without a restart"
    ),
    "attach": Command("rollcall.launch.commands.attach", "run a command on a node of a live run"),
    "cancel": Command("rollcall.launch.commands.cancel", "save and end a run's jobs"),
    "requeue": Command("rollcall.launch.commands.requeue", "start a run's job again"),
    "reproduce": Command("rollcall.launch.commands.reproduce", "submit a run again as a new run"),
    "sweep": Command("rollcall.launch.sweep.sweep", "submit many runs from one file"),
    "drill": Command("rollcall.launch.drill.drill", "inject a fault into a live run"),
    "doctor": Command("rollcall.launch.doctor.command", "check this machine before it trains"),
    "network": Command("rollcall.launch.commands.network", "measure the network between nodes"),
    "accept": Command("rollcall.accept.command", "check a machine or allocation; write one page"),
    "nodes": Command("rollcall.launch.commands.nodes", "list the nodes that failed in your jobs"),
    "lint": Command("rollcall.launch.lint", "find mistakes in sbatch scripts"),
    "batch": Command(
        "rollcall.launch.batch.batch", "start a job's step and requeue the job", False
    ),
    "remote": Command("rollcall.launch.remote.ssh", "run a command on another machine", False),
    "array": Command("rollcall.launch.sweep.local", "run an array on this machine", False),
    "supervise": Command("rollcall.launch.node.supervise", "run one node's part of a run", False),
}
"""Commands about runs, also as `python -m launch COMMAND`."""

COMMANDS = {
    "train": Command("rollcall.train.main", "train a model, in this process or under torchrun"),
    **LAUNCH,
    **TRAIN,
    "bench": Command("rollcall.bench.__main__", "measure, and print tables: speed-up, overhead, …"),
    "completion": Command(
        "rollcall.cli.completion", "print shell completion for bash, zsh or fish"
    ),
}
