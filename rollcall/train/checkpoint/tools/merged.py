"""Write the model of a run as transformers loads it, with its adapters merged into the weights."""

import importlib
from pathlib import Path
from typing import Any

from rollcall.config import ConfigError
from rollcall.config.read import tokenizer_folder
from rollcall.config.schema import Parallel
from rollcall.train.checkpoint.tools import export
from rollcall.train.inference import trained
from rollcall.train.main import on_all_ranks


def write(run: str, target: Path, best: bool) -> int:
    """Write the newest or best checkpoint, in fp32 and whole in memory; return the exit code."""
    run_dir, config = trained.find(run, [])
    alone = {"parallel": Parallel(strategy="single"), "device": "cpu", "precision": "fp32"}
    config = config.model_copy(update=alone)

    def merge(world: Any, _: Any) -> int:
        with trained.load(run_dir, config, world, with_data=False, best=best) as model:
            network: Any = model.strategy.model
            if not hasattr(network, "lora"):
                raise ConfigError(f"{run_dir.path} has no adapters; remove --merge")
            layer_type = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
            for name, layer in [*network.named_modules()]:
                if isinstance(layer, layer_type):
                    layer.merge(safe_merge=True)
                    network.set_submodule(name, layer.get_base_layer())
            network.config.use_cache = True
            with export.new_folder(target) as folder:
                network.save_pretrained(folder)
                export.copy_companions([tokenizer_folder(config)], folder)
            print(f"{target}: the model of {run_dir.path} at step {model.step}, adapters merged")
        return 0

    return on_all_ranks("cpu", merge)
