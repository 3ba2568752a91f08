"""`rollcall lint FILE…`: find common mistakes in sbatch scripts.

Exit code: 0 without findings, 1 with findings, 2 if a file cannot be read.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rollcall.cli.parser import parser as command_parser
from rollcall.system.files import read_whole
from rollcall.tools.lint import directives, launches
from rollcall.tools.lint.script import Rule, Script

RULES = (*directives.RULES, *launches.RULES)
NOT_A_JOB = "is not an sbatch script: expected #!/bin/bash in the first line, or #SBATCH lines"


def main(argv: Sequence[str]) -> int:
    """Print the findings of the scripts; return the exit code."""
    parser = command_parser("lint", "Find mistakes in sbatch scripts.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="an sbatch script")
    code = 0
    for path in parser.parse_args(argv).files:
        try:
            script = Script(path, read_whole(path).decode())
            is_job = script.text.startswith("#!") or script.directives or script.late
            problem = "" if is_job else f"{path} {NOT_A_JOB}"
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            problem = f"{path} cannot be read: {reason}; expected an sbatch script"
        if problem:
            print(f"rollcall: error: {problem}", file=sys.stderr)
            code = 2
            continue
        findings = check(script)
        what = "" if script.is_shell else " in #SBATCH lines, the rest is not a shell script"
        clean = f"{path}: no findings{what}"
        print("\n".join(findings) or clean, file=sys.stdout if findings else sys.stderr)
        code = max(code, bool(findings))
    return code


def check(script: Script) -> list[str]:
    """Return a script's findings, sorted by line: `file:line: reason`, fix and rule."""
    findings = sorted((finding, name(rule)) for rule in RULES for finding in rule(script))
    return [
        f"{script.path}:{finding.line}: {finding.reason}\n    fix: {finding.fix} [{rule}]"
        for finding, rule in findings
    ]


def name(rule: Rule) -> str:
    """Return the rule's name as findings show it."""
    return rule.__name__.replace("_", "-")
