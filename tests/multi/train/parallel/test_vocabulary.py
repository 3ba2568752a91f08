"""A vocabulary divided over tensor ranks: embedding, head and loss equal one process's."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import leave_out_operations, together
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from rollcall.config import ConfigError, parse
from rollcall.tools.bench import rank_jobs
from rollcall.tools.bench.rank_jobs import Job
from rollcall.train import models
from rollcall.train.checkpoint.tools import export
from rollcall.train.data import sets
from rollcall.train.data.order import validation_batches
from rollcall.train.numerics import cross_entropy, losses
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.device import local_of, whole_of
from rollcall.train.ranks.world import World

TOKENS, CLASSES = 37, 101  # 34, 34 and 33 classes on three ranks
WORDS = (
    *(word for word in rank_jobs.WORDS if not word.startswith("train.steps")),
    "train.steps=4",
    "checkpoint.every=2",
    "data.name=synthetic_tokens",
    "data.num_samples=64",
    "data.num_classes=67",  # 34 and 33 on two ranks
    "data.seq_len=16",
    "data.global_batch=16",
    "data.micro_batch=4",
    "model.name=gpt",
    "model.hidden_size=32",
    "model.num_layers=2",
    "optim.name=sgd",
    "optim.lr=0.1",
    "train.loss_args={label_smoothing: 0.1, z_loss: 0.01}",
)
SEQUENCE = "parallel.sequence_parallel=true"
MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "tensor": (2, ("parallel.strategy=tensor",)),
    "sequence": (2, ("parallel.strategy=tensor", SEQUENCE)),
    "shard×tensor": (4, ("parallel.mesh=shard=2,tensor=2",)),
    "shard×sequence": (4, ("parallel.mesh=shard=2,tensor=2", SEQUENCE)),
    "pipeline×sequence": (4, ("parallel.mesh=pipeline=2,tensor=2", SEQUENCE)),
}
TIED = "model.name=user_code:tied"


def test_losses_and_gradients_are_those_of_a_whole_layer(tmp_path: Path) -> None:
    together(3, _compare_losses, tmp_path)


def _compare_losses(rank: int, _: Path) -> None:
    world = World.join("cpu")
    mesh = init_device_mesh("cpu", (3,))
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 8, generator=generator) for size in (TOKENS, CLASSES))
    targets = torch.randint(CLASSES, (TOKENS,), generator=generator)
    targets[::5] = -100
    factors = torch.rand(TOKENS, generator=generator)
    plain, layer = (nn.Linear(8, CLASSES, bias=False) for _ in range(2))
    plain.weight = nn.Parameter(weight)
    layer.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    local: Any = layer.weight
    assert len(local.to_local()) == (34, 34, 33)[rank]
    for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.0), (0.2, 0.1)):
        whole = x.clone().requires_grad_()
        scores = plain(whole)
        expected = functional.cross_entropy(
            scores, targets, reduction="none", label_smoothing=smoothing
        )
        expected = expected + z_loss * scores.logsumexp(-1).square() * (targets != -100)
        wanted = torch.autograd.grad((expected * factors).sum(), (whole, plain.weight))
        for chunk in (1, 10 * CLASSES, 2**25):
            cross_entropy.CHUNK, cross_entropy.PRODUCT = chunk, 2 * chunk
            own = x.clone().requires_grad_()
            given = DTensor.from_local(own, mesh, [Replicate()], run_check=False)
            total, found = cross_entropy.of_layer(given, layer, targets, factors, smoothing, z_loss)
            gradients = torch.autograd.grad(total, (own, layer.weight))
            torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-6)
            for one, other in zip(map(whole_of, gradients), wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        given = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        hits = cross_entropy.of_layer(given, layer, targets, factors, 0.0, 0.0)[1][1]
        assert torch.equal(hits, (plain(x).argmax(-1) == targets).float())
    for wrong in (CLASSES, -1):  # on every rank
        with pytest.raises(IndexError):
            cross_entropy.of_layer(given, layer, targets.fill_(wrong), factors, 0.0, 0.0)
    world.leave()


@pytest.mark.parametrize("own", [(), (TIED,)], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "ranks",
    [pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.campaign)],
)
def test_an_uneven_vocabulary_equals_one_process(
    ranks: int, own: tuple[str, ...], tmp_path: Path
) -> None:
    """Also resumed on one process, and continued from one."""
    alone = Job(tmp_path / "alone", [*WORDS, *own])
    rank_jobs.run([alone], tmp_path / "logs-1", 1, prepare=leave_out_operations)
    cells = {
        name: words
        for name, (count, words) in MESHES.items()
        if count == ranks and not (own and "pipeline" in name)
    }
    jobs = {name: Job(tmp_path / name, [*WORDS, *own, *words]) for name, words in cells.items()}
    for name, words in cells.items():
        continued = Job(
            tmp_path / f"{name}-continued", [*WORDS, *own, *words, 'parallel.check="off"']
        )
        _copy(alone, continued)
        jobs[f"{name}-continued"] = continued
    rank_jobs.run(list(jobs.values()), tmp_path / "logs", ranks, prepare=leave_out_operations)
    resumed = [Job(tmp_path / f"{name}-resumed", [*WORDS, *own]) for name in cells]
    for name, job in zip(cells, resumed, strict=True):
        _copy(jobs[name], job)
    rank_jobs.run(resumed, tmp_path / "logs-resumed", 1, prepare=leave_out_operations)
    expected, weights = alone.losses(), _weights(alone)
    for name, job in [*jobs.items(), *((job.root.name, job) for job in resumed)]:
        found = job.losses()
        assert found == pytest.approx(expected[-len(found) :], rel=1e-6), name
        # And the evaluation.
        assert len(found) == (3 if name.endswith(("resumed", "continued")) else 5)
        for key, tensor in _weights(job).items():
            torch.testing.assert_close(tensor, weights[key], rtol=0, atol=1e-6, msg=f"{name} {key}")


def _copy(source: Job, target: Job) -> None:
    saved = source.run_dir.checkpoints / "step-00000002"
    shutil.copytree(saved, target.run_dir.checkpoints / saved.name)


def _weights(job: Job) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = export.read(max(job.run_dir.checkpoints.iterdir()))["model"]
    return model


@pytest.mark.parametrize("more", [(), (SEQUENCE,)], ids=["tensor", "sequence"])
def test_no_rank_keeps_whole_logits(more: tuple[str, ...], tmp_path: Path) -> None:
    """A rank keeps half of the weights of the vocabulary, and no logits."""
    together(2, partial(_count_saved, more), tmp_path)
    for file in tmp_path.glob("rank-*.json"):
        found = json.loads(file.read_text())
        vocabulary = 2048
        rows, length, hidden = 2, 16, 32
        assert found["weights"] == {
            "embedding": vocabulary // 2 * hidden,
            "head": vocabulary // 2 * hidden,
        }
        # No logits; a user's loss gets them whole.
        assert found["cross_entropy"] == []
        assert max(found["own"]) == rows * length * vocabulary


def _count_saved(more: tuple[str, ...], rank: int, folder: Path) -> None:
    world = World.join("cpu")
    words = [*WORDS, "data.num_classes=2048", "parallel.strategy=tensor", *more]
    config = parse(words)[1]
    source = sets.load(config.data, world)
    batch = next(validation_batches(source, 2, 0, 1))
    found: dict[str, object] = {}
    for name in ("cross_entropy", "own"):
        loss = losses.build("cross_entropy") if name != "own" else losses.Loss("own", _own_loss)
        strategy = Strategy(config, world, losses.Objective(loss))
        model = models.build(config.model, source)
        strategy.place(model, batch)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            local = local_of(tensor.detach())
            local = local.wait() if hasattr(local, "wait") else local  # a collective under way
            kept[local.untyped_storage().data_ptr()] = local.numel()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            strategy.forward_backward([batch], 2)
        ends = {name: model.get_parameter(f"{name}.weight") for name in ("embedding", "head")}
        found["weights"] = {
            name: local_of(weight.detach()).numel() for name, weight in ends.items()
        }
        weights = {
            local_of(one.detach()).untyped_storage().data_ptr() for one in model.parameters()
        }
        wide = [size for place, size in kept.items() if place not in weights and size > 2**14]
        found[name] = wide
        with torch.no_grad():  # an evaluation has all of them
            assert strategy.forward(batch).shape == (2, 16, 2048)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    world.leave()


def _own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    assert not isinstance(outputs, DTensor)
    found = functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return found.mean(1)


def test_what_does_not_divide_is_refused(tmp_path: Path) -> None:
    together(4, _refuse, tmp_path)


def _refuse(_: int, __: Path) -> None:
    world = World.join("cpu")
    for words, message in (
        (
            ["data.num_classes=5", "model.num_kv_heads=4"],
            "layer embedding has a vocabulary of 5, too small for tensor=4",
        ),
    ):
        config = parse([*WORDS, "parallel.strategy=tensor", *words])[1]
        source = sets.load(config.data, world)
        batch = next(validation_batches(source, 2, 0, 1))
        strategy = Strategy(config, world, losses.Objective(losses.build("cross_entropy")))
        with pytest.raises(ConfigError, match=message):
            strategy.place(models.build(config.model, source), batch)
        model: Any = models.build(config.model, source)
        model.tensor_plan = {"block0.attention_norm": "vocabulary"}
        with pytest.raises(ConfigError, match=r"to be an nn\.Linear or nn\.Embedding, got a RMS"):
            strategy.place(model, batch)
    dist.barrier()  # another rank may still connect to this one
    world.leave()
