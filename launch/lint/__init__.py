"""`rollcall lint FILE…`: find common mistakes in sbatch scripts.

Exit code: 0 without findings, 1 with findings, 2 if a file cannot be read.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rollcall.launch.lint import directives, launches
from rollcall.launch.lint.script import Finding, Script

Rule = Callable[[Script], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    directives.syntax_error,
    directives.commented_directive,
    directives.late_directive,
    directives.unknown_option,
    directives.short_time,
    directives.output_directory,
    directives.requeue_truncates,
    launches.rank_in_batch_shell,
    launches.wrapper_without_exec,
    launches.signal_to_nobody,
    launches.signal_kills_torchrun,
    launches.fixed_node_count,
    launches.fixed_port,
    launches.fixed_rendezvous_id,
    launches.pipe_hides_failure,
    launches.tasks_mismatch,
    launches.torchrun_without_srun,
    launches.srun_without_cpus,
    launches.missing_node_count,
    launches.local_address,
    launches.visible_devices,
    launches.shared_port,
    launches.hidden_exit_code,
)


def main(argv: Sequence[str]) -> int:
    """Print the findings of the scripts; return the exit code."""
    meaning = "Find mistakes in sbatch scripts."
    parser = argparse.ArgumentParser(prog="rollcall lint", description=meaning)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    code = 0
    for path in parser.parse_args(argv).files:
        try:
            script = Script(path, path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            print(f"rollcall: error: {path} cannot be read: {reason}", file=sys.stderr)
            code = 2
            continue
        for line in check(script):
            print(line)
            code = max(code, 1)
    return code


def check(script: Script) -> list[str]:
    """Return a script's findings, sorted by line: `file:line: reason`, fix and rule."""
    found = sorted((finding, name(rule)) for rule in RULES for finding in rule(script))
    return [
        f"{script.path}:{finding.line}: {finding.reason}\n    fix: {finding.fix} [{rule}]"
        for finding, rule in found
    ]


def name(rule: Rule) -> str:
    """Return the rule's name as findings show it."""
    return rule.__name__.replace("_", "-")
