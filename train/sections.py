"""What may a user ask for of a model and its steps? A part of the schema. No torch."""

from __future__ import annotations

import os
from typing import Literal

# Scanning every installed package for pydantic plugins costs a sixth of the start of a command.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pydantic import BaseModel, ConfigDict
from pydantic import Field as Field


class ConfigError(ValueError):
    """A user's request that cannot be met; the message says what was expected and what to do."""


class Section(BaseModel):
    """A group of keys: unknown ones are refused, values do not change once they are checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Model(Section):
    """What is trained."""

    name: str = Field(
        default="cnn",
        description="cnn, mlp, gpt, a classification model of torchvision such as resnet18 or "
        "vit_b_16, or package.module:attribute",
    )
    hidden: int = Field(default=128, ge=1, description="width of the hidden layer; of gpt's blocks")
    layers: int = Field(default=4, ge=1, description="blocks of gpt")
    heads: int = Field(default=4, ge=1, description="heads of gpt's attention")
    kv_heads: int = Field(default=2, ge=1, description="heads of keys and values that they share")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="probability of dropping a hidden unit"
    )
    activation_checkpointing: Literal["none", "blocks", "selective"] = Field(
        default="none",
        description="blocks keeps only their inputs for the backward pass, selective also "
        "multiplications; the rest is computed again",
    )
    sync_batchnorm: bool = Field(
        default=False, description="BatchNorm takes its statistics from the samples of all ranks"
    )
    channels_last: bool = Field(
        default=False, description="images lie in memory pixel by pixel, as GPUs convolve them best"
    )


class Optim(Section):
    """How a step changes the weights."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="adamw", description="the optimizer")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    implementation: Literal["auto", "fused", "foreach", "single"] = Field(
        default="auto",
        description="kernels of the update: one for all weights, one for each operation, one for "
        "each tensor; auto is fused on GPUs, single on CPUs",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay (for adamw decoupled)")
    decay: Literal["all", "matrices"] = Field(
        default="all", description="what decays; matrices leaves out norms and biases"
    )
    momentum: float = Field(
        default=0.9, ge=0, lt=1, description="momentum of sgd; the others ignore it"
    )
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        default="constant",
        description="learning rate after the warm-up; cosine and linear fall to zero at the end, "
        "wsd stays and then falls in the last part",
    )
    decay_share: float = Field(
        default=0.2, gt=0, le=1, description="the last part of wsd's steps, in which it falls"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up from zero")
    lr_rule: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="how the learning rate grows with data.global_batch / optim.base_batch",
    )
    base_batch: int | None = Field(
        default=None, ge=1, description="global batch for which optim.lr was found; for lr_rule"
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="largest norm of the whole gradient (default: no clipping)"
    )
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="decay per step of an exponential moving average of the weights, saved with "
        "them (default: none)",
    )
    evaluate_ema: bool = Field(default=False, description="evaluate the average of the weights")


class Train(Section):
    """How long to train."""

    epochs: float = Field(default=10, gt=0, description="passes over the training data")
    steps: int | None = Field(
        default=None, ge=1, description="stop after this many steps instead (default: by epochs)"
    )
    evaluate_every: float | None = Field(
        default=None, gt=0, description="epochs between evaluations (default: only at the end)"
    )
    loss: str = Field(
        default="cross_entropy", description="cross_entropy, mse, or package.module:attribute"
    )
    compile: bool = Field(default=False, description="torch.compile each block of the model")


class Faults(Section):
    """What is done when a step goes wrong."""

    limit: int = Field(
        default=10,
        ge=1,
        description="steps in a row that may change nothing, for a loss or gradient that is not "
        "finite",
    )
    then: Literal["back", "stop"] = Field(
        default="stop",
        description="after that: back goes to the last checkpoint and leaves those batches out",
    )
    spike: float | None = Field(
        default=None,
        gt=1,
        description="skip a step whose loss is so many times the mean of the last ones; costs a "
        "collective (default: none is)",
    )
    evidence: int = Field(
        default=3, ge=0, description="faults of an attempt whose weights are kept, to replay them"
    )
    hang_seconds: Literal["auto"] | float | None = Field(
        default="auto",
        description="without progress for so long in a step, all ranks report where they are and "
        "end; auto: ten times the longest so far, at least 300 (null: never)",
    )
    divergence: Literal["warn", "stop", "off"] = Field(
        default="warn", description="when ranks that should hold the same weights do not"
    )
