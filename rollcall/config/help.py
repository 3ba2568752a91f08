"""`rollcall train --help [SECTION | KEY | all]`, generated from the schema. No torch."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rollcall.config import arguments
from rollcall.config.keys import Key, describe, sections
from rollcall.config.read import RECIPES, recipes
from rollcall.config.refusals import unknown_key
from rollcall.config.schema import ConfigError
from rollcall.messages.refusal import refuse
from rollcall.messages.text import did_you_mean, table


def main(words: Sequence[str]) -> int:
    """Print the help for the topics beside `--help`; return the exit code."""
    others = recipes()
    topics = [word for word in words if word not in others and not word.startswith("-")]
    topics = [word for word in topics if "=" not in word and not word.endswith((".yaml", ".yml"))]
    try:
        print("\n".join(_topic(topic) for topic in topics) or _short())
    except (LookupError, ConfigError) as error:
        return refuse(error.args[0])
    return 0


def _short() -> str:
    usage = Path(__file__).with_name("help.txt").read_text().rstrip()
    return usage.format(
        recipes=_table({name: _meaning_of_recipe(name) for name in recipes()}),
        sections=_table(sections()),
        others=", ".join(key.name for key in describe() if "." not in key.name),
    )


def _topic(topic: str) -> str:
    keys = list(describe())
    if ":" in topic:
        return arguments.describe(topic)
    if topic == "all":
        return "\n".join(map(_entry, keys))
    if topic in sections():
        entries = [_entry(key) for key in keys if key.name.startswith(f"{topic}.")]
        return "\n".join([f"{topic}: {sections()[topic]}\n", *entries])
    if key := next((key for key in keys if key.name == topic), None):
        return _entry(key)
    hint = "" if "." in topic else did_you_mean(topic, sections())
    raise LookupError(f"unknown section '{topic}'{hint}" if hint else unknown_key(topic))


def _entry(key: Key) -> str:
    words = {"None": "null", "True": "true", "False": "false"}
    default = words.get(str(key.default), key.default)
    title = f"{key.name}  ({key.type}; default: {default})"
    lines = textwrap.fill(title, 79, subsequent_indent="  ")
    return f"{lines}\n{textwrap.indent(textwrap.fill(key.meaning, 75), '    ')}"


def _table(rows: dict[str, str]) -> str:
    return "\n".join(f"  {line}" for line in table([*rows.items()]))


def _meaning_of_recipe(name: str) -> str:
    """Return the first comment of the file that is not for editors."""
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    comments = (line.removeprefix("# ") for line in lines if line.startswith("# "))
    return next((line for line in comments if "$schema" not in line), "")
