"""Which options around the step can stand together? No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.parallel.mesh import parse
from train.parallel.options import SPLIT_BACKWARD

if TYPE_CHECKING:
    from train.schema import Config


def check(config: Config) -> None:
    """Refuse what would be ignored or cannot work.

    Raises:
        ValueError: says which options, and what to choose.
    """
    _check_optim(config)
    names = parse(config.parallel.mesh_text)
    cut = [name for name in ("tensor", "pipeline", "context") if name in names]
    for key, is_set, cannot in (
        ("model.sync_batchnorm=true", config.model.sync_batchnorm, cut),
        ("model.channels_last=true", config.model.channels_last, cut),
        ("precision=fp8", config.precision == "fp8", [name for name in cut if name == "tensor"]),
    ):
        if is_set and cannot:
            raise ValueError(
                f"{key} cannot work on a mesh with {' and '.join(cannot)}: choose ddp, zero1, "
                "zero2, zero3 or hsdp, or leave it out"
            )
    _check_schedule(config)
    if config.train.compile and config.parallel.strategy == "dp":
        raise ValueError(
            "train.compile=true compiles for one GPU, and parallel.strategy=dp copies the model to "
            "several: choose ddp"
        )


def _check_schedule(config: Config) -> None:
    schedule = config.parallel.schedule_name
    for key, is_set in (
        ("model.activation_checkpointing", config.model.activation_checkpointing != "none"),
        ("train.compile", config.train.compile),
    ):
        if is_set and schedule in SPLIT_BACKWARD:
            raise ValueError(
                f"{key} joins the gradients of a block's inputs and weights, which "
                f"parallel.schedule={schedule} computes apart: choose parallel.schedule=interleaved"
            )


def _check_optim(config: Config) -> None:
    optim = config.optim
    if (optim.lr_rule == "none") != (optim.base_batch is None):
        raise ValueError(
            "optim.lr_rule and optim.base_batch belong together: the learning rate grows with "
            "data.global_batch / optim.base_batch; give both or neither"
        )
    if optim.evaluate_ema and optim.ema is None:
        raise ValueError(
            "optim.evaluate_ema=true needs an average to evaluate: set optim.ema, such as 0.999"
        )
    if (
        optim.schedule != "wsd"
        and optim.decay_share != type(optim).model_fields["decay_share"].default
    ):
        raise ValueError(
            f"optim.decay_share is an option of optim.schedule=wsd, not of {optim.schedule}: leave "
            "it out"
        )
