"""Continue a run with other values than before: say so, or refuse what changes its data."""

import json
from collections.abc import Mapping
from typing import Any

from rollcall.config import ConfigError, describe
from rollcall.config.keys import on_resume
from rollcall.config.schema import OnResume
from rollcall.messages.text import dotted
from rollcall.train.ranks.run import Run

EVENT = "changed"


def tell(run: Run, step: int, facts: Mapping[str, Any]) -> None:
    """Compare the configuration with that in the `facts` of the checkpoint of this step.

    What differs is printed and recorded once, not again by restarts with the same values. Raise
    ConfigError on every rank for a change of the order of the samples that was not allowed.
    """
    found = find(facts.get("config") or {}, run.config.model_dump(mode="json"))
    rules, allowed = on_resume(), run.config.run.changes_allowed
    if refused := [key for key in found if rules[key] is OnResume.REFUSE and key not in allowed]:
        raise ConfigError(
            f"run {run.run_dir.name} was trained with other values: {_list(found, refused)}. They "
            "change the order of the samples. Resume with the values from before, start a new run "
            f"with another run.name, or add run.allow_changes={','.join(refused)} to continue"
        )
    changes = {key: list(pair) for key, pair in found.items()}
    if not changes or not run.world.is_main:
        return
    earlier = run.run_dir.read_events(EVENT)
    if not earlier or (earlier[-1].get("step"), earlier[-1].get("changes")) != (step, changes):
        text = f"continues with other values: {_list(found, found)}"
        run.tell(EVENT, text, step=step, changes=changes)


def find(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the value before and now of each key that matters and differs."""
    old, new, rules = dotted(before), dotted(now), on_resume()
    defaults = {key.name: key.default for key in describe()}
    watched = [name for name in rules if rules[name] is not OnResume.IGNORE]
    pairs = {name: (old.get(name, defaults[name]), new[name]) for name in watched}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _list(found: Mapping[str, tuple[Any, Any]], names: Any) -> str:
    return ", ".join(f"{name} {_text(found[name][0])} -> {_text(found[name][1])}" for name in names)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
