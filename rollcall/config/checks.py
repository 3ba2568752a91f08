"""Refuse keys that contradict each other or would have no effect, for any world size. No torch.

The model, the data and the world size are checked where these are known.
"""

import re
from collections.abc import Collection

from rollcall.config.catalog import DATA_SETS, LOSSES
from rollcall.config.keys import on_resume
from rollcall.config.mesh import PRESETS, parse
from rollcall.config.schema import Config, ConfigError, OnResume, Parallel, Profile, Section

DATA_KEYS = {
    "seq_len": ("text", "tokens", "synthetic_tokens"),
    "image_size": ("folder", "synthetic_images"),
    "num_samples": ("synthetic_images", "synthetic_tokens"),
}
"""Keys that only some of the data sets use."""
DDP_KEYS = ("bucket_mb", "compression")
OUTER_KEYS = ("outer_lr", "outer_momentum")
EXPERT_KEYS = (
    *("top_k", "expert_size", "shared_experts", "balance_rate", "balance_loss", "router_z_loss"),
)
V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose stages run over the ranks and back: the first rank also has the last stage."""
SPLIT_BACKWARD = ("zero-bubble", *V_SHAPED)
"""Schedules that compute the gradients of inputs first, and of weights later."""
LOOPED = ("interleaved", "breadth-first", *SPLIT_BACKWARD)
"""Schedules with several stages on each rank."""
FIGURES = ("loss", "accuracy", "top5", "perplexity")
"""Figures that an evaluation may have without the user's code."""


def check(config: Config, named: Collection[str] = ()) -> None:
    """Raise ConfigError for keys that cannot work, or that are `named` and would have no effect."""
    known = [name for name, rule in on_resume().items() if rule is OnResume.REFUSE]
    if wrong := [name for name in config.run.changes_allowed if name not in known]:
        raise ConfigError(f"run.allow_changes: expected {' or '.join(known)}, got '{wrong[0]}'")
    _check_batch(config)
    _check_mesh(config.parallel)
    _check_sync(config)
    _check_unused_parallel_keys(config.parallel)
    _check_schedule(config)
    _check_exact(config)
    _check_optim(config, named)
    _check_train(config)
    _check_model(config)
    _check_profile(config.profile)


def _check_profile(profile: Profile) -> None:
    span = re.fullmatch(r"([1-9]\d*):(\d+)", profile.steps or "1:2")
    if not span or int(span[2]) <= int(span[1]):
        raise ConfigError(
            f"profile.steps={profile.steps}: expected FIRST:END with END after FIRST, counted from "
            "1, such as 10:13 for the steps 10 to 12"
        )
    if not re.fullmatch(r"all|\d+(,\d+)*", profile.ranks):
        raise ConfigError(f"profile.ranks={profile.ranks}: expected all, or ranks such as 0,5")
    for key in ("ranks", "tool"):
        if profile.steps is None and _is_set(profile, key):
            raise ConfigError(
                f"profile.{key} needs profile.steps, such as profile.steps=10:13; a live run "
                "is profiled by rollcall profile RUN"
            )


def _is_set(section: Section, key: str) -> bool:
    return bool(getattr(section, key) != type(section).model_fields[key].default)


def _check_batch(config: Config) -> None:
    micro, batch = config.data.micro_batch, config.data.global_batch
    if micro == "auto":
        if "pipeline" in config.parallel.mesh_text:
            raise ConfigError(
                "data.micro_batch=auto: a pipeline is built for the size of its micro-batches; "
                "set a number, or remove the key"
            )
    elif micro is not None and micro > batch:
        raise ConfigError(
            f"data.micro_batch={micro} is larger than data.global_batch={batch}; choose at most "
            f"{batch}"
        )

    for key, users in DATA_KEYS.items() if config.data.name in DATA_SETS else ():
        if config.data.name not in users and _is_set(config.data, key):
            raise ConfigError(
                f"data.{key} is an option of {', '.join(users)}; data.name={config.data.name} "
                "does not use it: remove the key"
            )
    for key in ("pad", "collate") if config.data.pack else ():
        if getattr(config.data, key):
            raise ConfigError(f"data.pack and data.{key} both make batches of rows; remove one")
    is_of_model = config.data.pack and config.train.loss == "model"
    if is_of_model and config.train.loss_args.get("counts") not in ("next", "labels"):
        raise ConfigError(
            "data.pack with train.loss=model needs train.loss_args.counts: next if the model "
            "predicts each token from those before it, labels if not"
        )


def _check_mesh(parallel: Parallel) -> None:
    try:
        names = parse(parallel.mesh_text)
    except ValueError as error:
        raise ConfigError(f"parallel.mesh={parallel.mesh}: {error}") from None
    if parallel.mesh is not None and not PRESETS[parallel.strategy].mesh:
        raise ConfigError(
            f"parallel.mesh={parallel.mesh} is for several ranks, but "
            f"parallel.strategy={parallel.strategy} is for one; remove one of the two"
        )
    if parallel.stage == 1 and {"tensor", "pipeline", "expert"} & {*names}:
        raise ConfigError(
            "parallel.strategy=zero1 shards the optimizer of whole models, so the mesh cannot have "
            "tensor, pipeline or expert; choose zero2 or zero3"
        )


def _check_sync(config: Config) -> None:
    parallel = config.parallel
    if parallel.sync == "step":
        return
    names = {*parse(parallel.mesh_text)}
    if "replicate" not in names or names - {"replicate", "shard"} or parallel.stage == 1:
        raise ConfigError(
            f"parallel.sync={parallel.sync} needs replicas that can train alone, which "
            f"{parallel.choice} does not have; choose ddp, hsdp, or a mesh such as "
            "replicate=2,shard=rest"
        )
    for key, is_set in (
        ("exact=true", config.exact),
        ("precision=fp16", config.precision == "fp16"),
        ("model.experts", config.model.experts),
        ("model.sync_batchnorm=true", config.model.sync_batchnorm),
        ("model.sync_buffers", config.model.sync_buffers),
        ("train.gather=true", config.train.gather),
        ("faults.spike_factor", config.faults.spike_factor),
    ):
        if is_set:
            raise ConfigError(
                f"{key} makes all replicas agree in every step, but with parallel.sync="
                f"{parallel.sync} they meet only every {parallel.sync_every} steps; remove one of "
                "the two keys"
            )


def _check_unused_parallel_keys(parallel: Parallel) -> None:
    names = parse(parallel.mesh_text)
    is_cut = bool({"tensor", "pipeline", "expert"} & {*names})
    has_fsdp = "shard" in names and parallel.stage > 1
    has_ddp = not has_fsdp and not is_cut and bool({"replicate", "shard", "context"} & {*names})
    has_ddp, is_apart = has_ddp and parallel.sync == "step", parallel.sync != "step"
    is_looped = parallel.schedule_name in LOOPED
    for keys, is_used, users, choice in (
        (("cpu_offload",), has_fsdp, "zero2, zero3 and hsdp", "choose one of them"),
        (DDP_KEYS, has_ddp, "ddp and zero1", "choose one of them"),
        (("schedule", "balance"), "pipeline" in names, "pipelines", "choose pipeline or split"),
        (("stages_per_rank",), is_looped, ", ".join(LOOPED), "set parallel.schedule to one"),
        (("sequence_parallel",), "tensor" in names, "tensor parallelism", "choose tensor"),
        (("sync_every", "sync_compression"), is_apart, "local-sgd and diloco", "set parallel.sync"),
        (OUTER_KEYS, parallel.sync == "diloco", "diloco", "set parallel.sync=diloco"),
    ):
        for key in keys:
            if _is_set(parallel, key) and not is_used:
                raise ConfigError(
                    f"parallel.{key} is an option of {users}, which this run does not use; "
                    f"{choice}, or remove the key"
                )


def _check_schedule(config: Config) -> None:
    parallel = config.parallel
    name = parallel.schedule_name
    if name in V_SHAPED and parallel.stages_per_rank != 2:
        raise ConfigError(
            f"parallel.schedule={name} has two stages on each rank, not "
            f"parallel.stages_per_rank={parallel.stages_per_rank}; remove the key"
        )
    if name not in SPLIT_BACKWARD:
        return
    if "shard" in parse(parallel.mesh_text) and parallel.stage == 3:
        raise ConfigError(
            f"parallel.schedule={name} computes the gradients of weights later than the gradients "
            "of inputs, so weights must stay gathered; choose parallel.strategy=zero2"
        )
    for key, is_set in (
        ("model.activation_checkpointing", config.model.activation_checkpointing != "none"),
        ("train.compile", config.train.compile),
    ):
        if is_set:
            raise ConfigError(
                f"{key} computes the gradients of inputs and weights together, but "
                f"parallel.schedule={name} computes them separately; choose "
                "parallel.schedule=interleaved"
            )


def _check_exact(config: Config) -> None:
    parallel = config.parallel
    if not config.exact:
        for key, is_set in (
            ("exact_shards", _is_set(config, "exact_shards")),
            ("log.fingerprints", config.log.fingerprints),
        ):
            if is_set:
                raise ConfigError(f"{key} needs exact mode; set exact=true, or remove the key")
        return
    if parallel.strategy not in ("single", "ddp") or {*parse(parallel.mesh_text)} - {"replicate"}:
        raise ConfigError(
            f"exact=true sums whole gradients in a fixed order, which does not work with "
            f"{parallel.choice}; choose parallel.strategy=ddp or single"
        )
    for name in DDP_KEYS:
        if _is_set(parallel, name):
            raise ConfigError(
                f"parallel.{name} is an option of DistributedDataParallel, which exact=true does "
                "not use; remove the key"
            )
    if config.data.micro_batch is not None:
        raise ConfigError(
            "data.micro_batch has no effect with exact=true, where every virtual shard is one "
            "micro-batch; remove the key, or increase exact_shards for smaller micro-batches"
        )


def _check_optim(config: Config, named: Collection[str]) -> None:
    optim = config.optim
    is_used = "sgd" in (optim.name, *(group.get("optimizer") for group in optim.groups.values()))
    if not is_used and ("optim.momentum" in named or _is_set(optim, "momentum")):
        raise ConfigError(
            f"optim.momentum is an option of optim.name=sgd, not of {optim.name}; remove the key"
        )
    if (optim.lr_scaling == "none") != (optim.base_batch is None):
        raise ConfigError(
            "optim.lr_scaling and optim.base_batch need each other: the learning rate is scaled "
            "with data.global_batch / optim.base_batch; set both or neither"
        )
    if optim.evaluate_ema and optim.ema is None:
        raise ConfigError("optim.evaluate_ema=true needs optim.ema; set it, for example to 0.999")
    if optim.schedule != "wsd" and _is_set(optim, "decay_fraction"):
        raise ConfigError(
            f"optim.decay_fraction is an option of optim.schedule=wsd, not of {optim.schedule}; "
            "remove the key"
        )


def _check_train(config: Config) -> None:
    best, watched = config.checkpoint.keep_best, config.train.stop_metric
    for key, metric in (("checkpoint.keep_best", best), ("train.stop_metric", watched)):
        if metric and not re.fullmatch(r"[^:]+(:max|:min)?", metric):
            expected = "expected the name of a figure, alone or with :max or :min"
            raise ConfigError(f"{key}={metric}: {expected}")
        name = (metric or "loss").partition(":")[0].rpartition("/")[2]  # of a validation set
        # The figures of the user's metrics and losses are known only when they are called.
        is_open = config.train.metrics or config.train.loss not in LOSSES.keys() - {"model"}
        if name not in FIGURES and not is_open:
            raise ConfigError(
                f"{key}={metric}: an evaluation has no such figure; choose {', '.join(FIGURES)} or "
                "add it to train.metrics"
            )
    if config.train.stop_after and not config.train.evaluate_every:
        raise ConfigError(
            "train.stop_after counts evaluations: set train.evaluate_every, for example to 1"
        )


def _check_model(config: Config) -> None:
    for key in () if config.model.experts else EXPERT_KEYS:
        if _is_set(config.model, key):
            raise ConfigError(
                f"model.{key} is an option of experts, which this model does not have; set "
                "model.experts, or remove the key"
            )
    names = parse(config.parallel.mesh_text)
    cut = [name for name in ("tensor", "pipeline", "context") if name in names]
    for key, is_set, cannot in (
        ("model.sync_batchnorm=true", config.model.sync_batchnorm, cut),
        ("model.channels_last=true", config.model.channels_last, cut),
        ("precision=fp8", config.precision == "fp8", [name for name in cut if name == "tensor"]),
    ):
        if is_set and cannot:
            raise ConfigError(
                f"{key} does not work on a mesh with {' and '.join(cannot)}; choose ddp, zero1, "
                "zero2, zero3 or hsdp, or remove the key"
            )
    for key in ("init_rename", "init_random"):
        if getattr(config.model, key) is not None and config.model.init is None:
            raise ConfigError(f"model.{key} needs model.init; set it, or remove the key")
    if not config.checkpoint.save_frozen and config.model.init is None:
        raise ConfigError(
            "checkpoint.save_frozen=false needs model.init, where a resumed run finds the frozen "
            "parameters; set it, or remove the key"
        )
    if config.checkpoint.mirror and config.checkpoint.local is None:
        raise ConfigError(
            "checkpoint.mirror=true needs checkpoint.local; set it, or remove the key"
        )
    if config.train.compile and config.parallel.strategy == "dp":
        raise ConfigError(
            "train.compile=true compiles for one GPU, but parallel.strategy=dp copies the model to "
            "several; choose ddp"
        )
