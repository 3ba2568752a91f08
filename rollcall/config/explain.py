"""`rollcall explain [recipe] [key=value …]`: show every key's value and its origin."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

from pydantic import BaseModel

from rollcall.config import describe, origins, parse, yaml_values
from rollcall.messages.text import table


def main(words: Sequence[str]) -> int:
    """Print one line for each key; return the exit code."""
    if "--help" in words or "-h" in words:
        print(__doc__)
        return 0
    _, config = parse(words, is_draft=True)
    origin, rows = origins(words), []
    for key, *_ in describe():
        value: Any = reduce(getattr, key.split("."), config)
        is_map = isinstance(value, dict) and value
        items = {f"{key}.{arg}": item for arg, item in value.items()} if is_map else {key: value}
        for name, item in items.items():
            plain = item.model_dump() if isinstance(item, BaseModel) else item
            text = yaml_values.dump(plain, default_flow_style=True, width=1000)
            text = text.removesuffix("\n...\n").strip()
            rows.append((f"{name}={text}", f"# {origin.get(name, 'default')}"))
    print("\n".join(table(rows)))
    return 0
