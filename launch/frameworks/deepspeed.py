"""DeepSpeed without its own launcher, which sets these in addition to torchrun's variables."""

from rollcall.launch.frameworks.framework import Framework, Place


def _variables(place: Place) -> dict[str, str]:
    values = {
        "CROSS_RANK": place.node,
        "CROSS_SIZE": place.nodes,
        "LOCAL_SIZE": place.local_world_size,
    }
    return {name: str(value) for name, value in values.items()}


FRAMEWORK = Framework(frozenset({"deepspeed"}), _variables, meets_at_master=True)
