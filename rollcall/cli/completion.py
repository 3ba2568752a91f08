"""`rollcall completion bash|zsh|fish`: print a script that completes commands, recipes and keys.

source <(rollcall completion bash)            # in ~/.bashrc
source <(rollcall completion zsh)             # in ~/.zshrc, after compinit
rollcall completion fish | source             # in ~/.config/fish/config.fish
"""

import itertools
import pkgutil
import shlex
from collections.abc import Sequence

from rollcall.cli.commands import COMMANDS
from rollcall.cli.parser import parser as command_parser
from rollcall.config import describe, recipes

WITH_KEYS = ("train", "submit", "plan", "explain", "verify", "matrix")
"""The commands that take a recipe and `key=value` words."""
BASH = """\
_rollcall() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "{commands}" -- "$word")
    elif [[ " {with_keys} " == *" ${{COMP_WORDS[1]}} "* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "{recipes} {keys}" -- "$word")
        [[ ${{COMPREPLY[0]}} != *= ]] || compopt -o nospace 2>/dev/null
    fi
}}
complete -o default -F _rollcall rollcall
"""
ZSH = """\
_rollcall() {{
    if ((CURRENT == 2)); then
        compadd -- {commands}
    elif [[ " {with_keys} " == *" ${{words[2]}} "* ]]; then
        compadd -- {recipes}
        compadd -S '' -- {keys}
        _files
    else
        _files
    fi
}}
compdef _rollcall rollcall
"""
FISH = """\
complete -c rollcall -n __fish_use_subcommand -f
{explained}
complete -c rollcall -n "__fish_seen_subcommand_from {with_keys}" -a "{recipes} {keys}"
"""


def main(argv: Sequence[str]) -> int:
    """Print the script of one shell; return the exit code."""
    parser = command_parser("completion", __doc__)
    scripts = {"bash": BASH, "zsh": ZSH, "fish": FISH}
    parser.add_argument("shell", choices=scripts)
    shell = parser.parse_args(argv).shell
    shown = {name: command.meaning for name, command in COMMANDS.items() if command.by_people}
    line = "complete -c rollcall -n __fish_use_subcommand -a {} -d {}"
    explained = [line.format(name, shlex.quote(meaning)) for name, meaning in shown.items()]
    names = [f"rollcall.{command.words}" for command in COMMANDS.values() if command.words]
    further = [pkgutil.resolve_name(name)() for name in names]
    words = {
        "commands": " ".join(shown),
        "explained": "\n".join(explained),
        "with_keys": " ".join(WITH_KEYS),
        "recipes": " ".join([*recipes(), *itertools.chain(*further)]),
        "keys": " ".join(f"{name}=" for name, *_ in describe()),
    }
    print(scripts[shell].format(**words), end="")
    return 0
