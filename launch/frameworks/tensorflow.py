"""TensorFlow: TF_CONFIG, by which MultiWorkerMirroredStrategy finds the other workers."""

import json

from rollcall.launch.frameworks.framework import Framework, Place


def _variables(place: Place) -> dict[str, str]:
    cluster = {"worker": list(place.addresses())}
    task = {"type": "worker", "index": place.rank}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


FRAMEWORK = Framework(frozenset({"tensorflow", "keras"}), _variables)
