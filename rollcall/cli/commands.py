"""The table of all commands, from commands.md: a command is one line there and one file."""

from pathlib import Path
from typing import NamedTuple

from rollcall.messages.text import table_in


class Command(NamedTuple):
    """A command of `rollcall`."""

    about: str  # runs or models; a `job` script runs the command, people do not
    module: str  # in `rollcall`; its `main(argv)` runs the command and returns the exit code
    meaning: str  # the line of `rollcall --help`

    @property
    def by_people(self) -> bool:
        """True if people type the command."""
        return self.about != "job"


COMMANDS = {
    name: Command(*cells) for name, *cells in table_in(Path(__file__).with_name("commands.md"))
}
LAUNCH = {name: command for name, command in COMMANDS.items() if command.about in ("runs", "job")}
"""Commands about runs, also as `python -m launch COMMAND`."""
TRAIN = {name: command for name, command in COMMANDS.items() if command.about == "models"}
"""Commands about models and checkpoints, also as `python -m train COMMAND`."""
