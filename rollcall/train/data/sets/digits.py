"""scikit-learn's handwritten digits: 1,797 real images of 8×8 pixels, without a download."""

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import torch

from rollcall.config.schema import ConfigError, Data
from rollcall.train.data.sets.images import ImageFormat, image_reader
from rollcall.train.data.source import InMemory, Source, data_set
from rollcall.train.ranks.world import World

IMAGE_FORMAT = ImageFormat(edge=8, mean=(0.0,), std=(1.0,))
PATH_IN_PACKAGE = "datasets/data/digits.csv.gz"


@data_set(reader=lambda *_: image_reader(IMAGE_FORMAT))
def digits(_config: Data, _world: World) -> Source:
    """Load the digits; every fifth is for validation."""
    # Lines of 64 pixels from 0 to 16, then the digit. json is twice as fast as numpy.loadtxt.
    text = gzip.decompress(_file().read_bytes()).decode().strip().replace("\n", ",")
    rows = np.array(json.loads(f"[{text}]")).reshape(-1, 65)
    inputs = torch.tensor(rows[:, :-1].reshape(-1, 1, 8, 8), dtype=torch.float32) / 16
    targets = torch.tensor(rows[:, -1], dtype=torch.int64)
    held_out = torch.arange(len(targets)) % 5 == 4
    train = InMemory(inputs[~held_out], targets[~held_out])
    validation = InMemory(inputs[held_out], targets[held_out])
    return Source(train, validation, shape=IMAGE_FORMAT.shape, classes=10)


def _file() -> Path:
    """Return the file in scikit-learn's package, whose import would take half a second."""
    spec = importlib.util.find_spec("sklearn")
    file = Path(*(spec.submodule_search_locations or ()) if spec else (), PATH_IN_PACKAGE)
    if not file.exists():
        advice = "install scikit-learn again (pip install --force-reinstall scikit-learn)"
        raise ConfigError(f"data.name=digits: {file} is missing; {advice}")
    return file
