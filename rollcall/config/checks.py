"""Refuse keys that contradict each other or would have no effect, for any world size. No torch.

The model, the data and the world size are checked where these are known.
"""

import functools
import re
from collections.abc import Collection, Iterator

from rollcall.config.catalog import DATA_SETS, LOSSES
from rollcall.config.keys import on_resume
from rollcall.config.mesh import PRESETS, parse
from rollcall.config.schema import Config, ConfigError, OnResume, Parallel, Profile

DATA_KEYS = {
    "seq_len": ("text", "tokens", "synthetic_tokens"),
    "image_size": ("folder", "synthetic_images"),
    "num_samples": ("synthetic_images", "synthetic_tokens"),
}
"""Keys that only some of the data sets use; commands of several runs give data.path to all."""
DATA_PATHS = {
    "folder": "a directory with a directory of images for each class, or train/ and val/ of such",
    "jsonl": "files with one JSON object a line",
    "tokens": "a directory with train.bin and val.bin, as `rollcall tokenize` writes them",
}
"""The meaning of data.path for the data sets that need it."""
DATA_PARTS = {"folder": "*/", "tokens": "train.*"}
"""A pattern of what such a directory holds at least."""
WEIGHTS = (
    "a .safetensors file, a .pt, .pth or .bin file of torch.save, a folder of Hugging Face, or a "
    "run or one of its checkpoints"
)
"""The meaning of model.init."""
DDP_KEYS = "parallel.bucket_mb parallel.compression"
PIPELINE_KEYS = "parallel.schedule parallel.balance"
SYNC_KEYS = (
    "parallel.sync_every parallel.sync_compression parallel.sync_fragments parallel.sync_overlap"
)
OUTER_KEYS = "parallel.outer_lr parallel.outer_momentum"
INIT_KEYS = "model.init_rename model.init_random checkpoint.save_frozen"
EXPERT_KEYS = (
    "model.top_k model.expert_size model.expert_capacity model.shared_experts model.balance_rate "
    "model.balance_loss model.router_z_loss model.dense_layers model.router_scores "
    "model.routed_scale"
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
    _check_unused(config, named)
    _check_sync(config)
    _check_schedule(config)
    _check_exact(config)
    _check_conflicts(config)
    _check_train(config)
    _check_profile(config.profile)
    model, step = config.model, 2 * config.model.num_heads
    if model.name in ("gpt", "llama") and model.hidden_size % step:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size}: expected a multiple of {step}, twice "
            f"model.num_heads; choose {-(-model.hidden_size // step) * step}"
        )


def check_data_path(config: Config) -> None:
    """Raise ConfigError if the data set needs a path and has none."""
    if config.data.path is None and (wanted := DATA_PATHS.get(config.data.name)):
        raise ConfigError(f"data.name={config.data.name} needs data.path: {wanted}")


def without_effect(config: Config, named: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each key that was named in vain: not refused, it may suit other runs."""
    data, steps, warmup = config.data, config.train.steps, config.optim.warmup_steps
    if "data.path" in named and data.name in {*DATA_SETS} - {"text", *DATA_PATHS}:
        yield f"data.path={data.path} has no effect on data.name={data.name}: remove it"
    if "train.epochs" in named and steps:
        yield f"train.epochs has no effect beside train.steps={steps}: add train.steps=null"
    if "optim.warmup_steps" in named and steps and warmup > steps:
        yield f"optim.warmup_steps={warmup} is more than train.steps={steps}: reduce it"


def _check_profile(profile: Profile) -> None:
    span = re.fullmatch(r"([1-9]\d*):(\d+)", profile.steps or "1:2")
    if not span or int(span[2]) <= int(span[1]):
        raise ConfigError(
            f"profile.steps={profile.steps}: expected FIRST:END with END after FIRST, counted from "
            "1, such as 10:13 for the steps 10 to 12"
        )
    if not re.fullmatch(r"all|\d+(,\d+)*", profile.ranks):
        raise ConfigError(f"profile.ranks={profile.ranks}: expected all, or ranks such as 0,5")


def _check_unused(config: Config, named: Collection[str]) -> None:
    """Refuse keys that only some runs use, if this one does not."""
    parallel, optim, model = config.parallel, config.optim, config.model
    names = {*parse(parallel.mesh_text)}
    has_fsdp = "shard" in names and parallel.stage > 1
    is_whole = not has_fsdp and not {"tensor", "pipeline", "expert"} & names
    has_ddp = is_whole and bool({"replicate", "shard", "context"} & names) and not config.exact
    is_apart, is_looped = parallel.sync != "step", parallel.schedule_name in LOOPED
    optimizers = optim.name, *(group.get("optimizer") for group in optim.groups.values())
    is_own, evaluates = config.data.name not in DATA_SETS, config.train.evaluate_every
    for keys, is_used, users, choice in (
        ("profile.ranks profile.tool", config.profile.steps, "profile.steps", "set profile.steps"),
        ("exact_shards log.fingerprints", config.exact, "exact mode", "set exact=true"),
        *(
            (f"data.{key}", is_own or config.data.name in users, ", ".join(users), "choose one")
            for key, users in DATA_KEYS.items()
        ),
        ("optim.momentum", "sgd" in optimizers, "optim.name=sgd", "choose sgd"),
        ("optim.decay_fraction", optim.schedule == "wsd", "optim.schedule=wsd", "choose wsd"),
        ("optim.evaluate_ema", optim.ema, "optim.ema", "set optim.ema, for example to 0.999"),
        (EXPERT_KEYS, model.experts, "experts", "set model.experts"),
        (INIT_KEYS, model.init, "model.init", "set model.init"),
        ("checkpoint.mirror", config.checkpoint.local, "checkpoint.local", "set checkpoint.local"),
        ("train.stop_after", evaluates, "evaluations", "set train.evaluate_every"),
        ("parallel.cpu_offload", has_fsdp, "zero2, zero3 and hsdp", "choose one of them"),
        (
            "parallel.reduce_scatter",
            has_fsdp and "pipeline" not in names,
            "zero2, zero3 and hsdp without a pipeline",
            "choose one of them",
        ),
        (DDP_KEYS, has_ddp and not is_apart, "ddp and zero1 without exact=true", "choose one"),
        (PIPELINE_KEYS, "pipeline" in names, "pipelines", "choose pipeline or split"),
        ("parallel.stages_per_rank", is_looped, ", ".join(LOOPED), "set parallel.schedule to one"),
        ("parallel.sequence_parallel", "tensor" in names, "tensor parallelism", "choose tensor"),
        (SYNC_KEYS, is_apart, "local-sgd and diloco", "set parallel.sync"),
        (OUTER_KEYS, parallel.sync == "diloco", "diloco", "set parallel.sync=diloco"),
    ):
        for key in () if is_used else keys.split():
            if _is_set(config, key) or key in {"optim.momentum"} & {*named}:
                raise ConfigError(
                    f"{key} is an option of {users}, which this run does not use; {choice}, or "
                    "remove the key"
                )


def _is_set(config: Config, key: str) -> bool:
    *sections, last = key.split(".")
    section = functools.reduce(getattr, sections, config)
    return bool(getattr(section, last) != type(section).model_fields[last].default)


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


def _check_exact(config: Config) -> None:
    parallel = config.parallel
    if not config.exact:
        return
    if parallel.strategy not in ("single", "ddp") or {*parse(parallel.mesh_text)} - {"replicate"}:
        raise ConfigError(
            f"exact=true sums whole gradients in a fixed order, which does not work with "
            f"{parallel.choice}; choose parallel.strategy=ddp or single"
        )


def _check_train(config: Config) -> None:
    optim, best, watched = config.optim, config.checkpoint.keep_best, config.train.stop_metric
    if (optim.lr_scaling == "none") != (optim.base_batch is None):
        raise ConfigError(
            "optim.lr_scaling and optim.base_batch need each other: the learning rate is scaled "
            "with data.global_batch / optim.base_batch; set both or neither"
        )
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


def _check_conflicts(config: Config) -> None:
    """Refuse keys that cannot work together with other ones."""
    parallel, model = config.parallel, config.model
    is_apart, splits = parallel.sync != "step", parallel.schedule_name in SPLIT_BACKWARD
    cut = [name for name in ("tensor", "pipeline", "context") if name in parse(parallel.mesh_text)]
    recomputes = model.activation_checkpointing != "none"
    on_mesh = (
        f"does not work on a mesh with {' and '.join(cut)}; choose ddp, zero1, zero2, zero3 or "
        "hsdp, or remove the key"
    )
    alone = (
        f"makes all replicas agree in every step, but with parallel.sync={parallel.sync} they meet "
        f"only every {parallel.sync_every} steps; remove one of the two keys"
    )
    separate = (
        "computes the gradients of inputs and weights together, but parallel.schedule="
        f"{parallel.schedule_name} computes them separately; choose parallel.schedule=interleaved"
    )
    goes_on, local = config.faults.on_lost_rank == "continue", config.checkpoint.local
    others = parallel.strategy != "ddp" or parallel.mesh or is_apart or config.exact or local
    only_ddp = "works only with ddp, without parallel.mesh, parallel.sync, exact, checkpoint.local"
    for key, is_conflict, reason in (
        ("faults.on_lost_rank=continue", goes_on and others, only_ddp),
        ("model.sync_batchnorm=true", model.sync_batchnorm and cut, on_mesh),
        ("model.channels_last=true", model.channels_last and cut, on_mesh),
        ("precision=fp8", config.precision == "fp8" and "tensor" in cut, on_mesh),
        ("exact=true", config.exact and is_apart, alone),
        ("precision=fp16", config.precision == "fp16" and is_apart, alone),
        ("model.experts", model.experts and is_apart, alone),
        ("model.sync_batchnorm=true", model.sync_batchnorm and is_apart, alone),
        ("model.sync_buffers", model.sync_buffers and is_apart, alone),
        ("train.gather=true", config.train.gather and is_apart, alone),
        ("faults.spike_factor", config.faults.spike_factor and is_apart, alone),
        ("model.activation_checkpointing", recomputes and splits, separate),
        ("train.compile", config.train.compile and splits, separate),
        (
            "data.micro_batch",
            config.data.micro_batch is not None and config.exact,
            "has no effect with exact=true, where every virtual shard is one micro-batch; remove "
            "the key, or increase exact_shards for smaller micro-batches",
        ),
        (
            "train.compile=true",
            config.train.compile and parallel.strategy == "dp",
            "compiles for one GPU, but parallel.strategy=dp copies the model to several; choose "
            "ddp",
        ),
        (
            "parallel.sync_fragments",
            parallel.sync_fragments > parallel.sync_every,
            f"must not exceed parallel.sync_every={parallel.sync_every}, the steps of a round",
        ),
        (
            "parallel.sync_overlap",
            parallel.sync_overlap >= parallel.sync_every,
            f"must be below parallel.sync_every={parallel.sync_every}, after which the next "
            "message leaves",
        ),
    ):
        if is_conflict:
            raise ConfigError(f"{key} {reason}")
