"""Replicas that train alone and meet seldom: equal to a plain loop, whatever interrupts them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import slow_link
import torch
import user_seldom
from collectives import Collectives
from ranks import Ranks, logged_steps, together, train
from torch import nn
from torch.nn import functional
from user_seldom import EVERY, WORDS, by_hand

from rollcall.config import parse
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint.tools import export
from rollcall.train.main import main
from rollcall.train.numerics import losses
from rollcall.train.numerics.losses import Objective
from rollcall.train.outer import Outer, pack, unpack
from rollcall.train.parallel.strategy import Strategy
from rollcall.train.ranks.world import World
from rollcall.train.step import Gradient, Updater
from rollcall.train.weights.deferred import Draws

SAME = 1e-6
HSDP = "parallel.mesh=replicate=2,shard=2 parallel.strategy=zero3"
STEPS = 2 * EVERY + 3  # in the middle of a round


def fresh(kind: type[nn.Module] = user_seldom.Classifier) -> nn.Module:
    with Draws(0):
        return kind()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() >= expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.detach(), rtol=SAME, atol=SAME)


def check(run_dir: RunDir, expected: dict[str, Any], model: nn.Module | None = None) -> None:
    losses = {line["step"]: line["loss"] for line in logged_steps(run_dir)}
    assert [losses[step] for step in sorted(losses)] == pytest.approx(expected["losses"], rel=SAME)
    saved = export.read(max(run_dir.checkpoints.iterdir()))
    for part in {"model", "ema"} & expected.keys():
        same(saved[part], expected[part])
    same(saved["outer"]["anchor"], expected["anchor"])
    same(saved.get("outer-momentum", {}), expected["momentum"])
    replicas = saved[f"replicas-{len(expected['replicas'])}"]
    for number, replica in enumerate(expected["replicas"]):
        for part, tensors in replica.items():
            same(replicas[str(number)][part], tensors)
    model, (inputs, targets) = model or fresh(), user_seldom.points()[1].tensors
    model.load_state_dict(expected["model"])
    loss = functional.cross_entropy(model(inputs), targets)
    [*_, last] = [line for line in read_lines(run_dir.events) if line["event"] == "evaluated"]
    assert last["loss"] == pytest.approx(loss.item(), rel=SAME)


@pytest.mark.parametrize(
    ("sync", "attempts"),
    [
        ("local-sgd", [(4, "data.micro_batch=3", 4, STEPS)]),
        ("diloco", [(2, "train.evaluate_every=0.8", 2, 7), (4, HSDP, 2, STEPS)]),  # in mid-round
        ("diloco", [(4, "data.micro_batch=2", 4, 8), (2, "", 2, STEPS)]),
        pytest.param("local-sgd", [(4, HSDP, 2, 8), (2, "", 2, STEPS)], marks=pytest.mark.long),
        pytest.param("diloco", [(2, "", 2, 12), (4, "", 4, STEPS)], marks=pytest.mark.long),
    ],
)
def test_replicas_train_as_in_a_plain_loop(
    tmp_path: Path, sync: str, attempts: list[tuple[int, str, int, int]]
) -> None:
    for number, (ranks, more, _, steps) in enumerate(attempts):
        words = [*WORDS, f"parallel.sync={sync}", f"train.steps={steps}", *more.split()]
        train(ranks, [*words, f"run.root={tmp_path}", "run.name=s"], tmp_path / f"logs-{number}")
    phases = [(replicas, steps) for _, _, replicas, steps in attempts]
    if len({replicas for replicas, _ in phases}) == 1:  # the interruption changes nothing
        phases = phases[-1:]
    check(RunDir(tmp_path, "s"), by_hand(fresh(), phases, sync))


def test_complex_weights_meet_and_are_averaged_after_they_were_frozen(tmp_path: Path) -> None:
    words = [*WORDS, "parallel.sync=diloco", "model.name=user_seldom:Turned", "train.steps=8"]
    train(2, [*words, f"run.root={tmp_path}", "run.name=s"], tmp_path / "logs")
    model = fresh(user_seldom.Turned)
    check(RunDir(tmp_path, "s"), by_hand(model, [(2, 8)], "diloco"), model)


@pytest.mark.parametrize(
    ("sync", "attempts", "overlap"),
    [
        ("diloco", [(2, 2, 13), (4, 4, 19)], 3),  # saved while both fragments travel
        pytest.param("local-sgd", [(4, 2, 12), (2, 2, STEPS)], 2, marks=pytest.mark.long),
    ],
)
def test_fragments_travel_while_replicas_train(
    tmp_path: Path, sync: str, attempts: list[tuple[int, int, int]], overlap: int
) -> None:
    fragments = {2: ["0.weight"], 0: ["0.bias", "2.weight", "2.bias"]}
    for number, (ranks, replicas, steps) in enumerate(attempts):
        words = [
            *WORDS,
            f"parallel.sync={sync}",
            f"train.steps={steps}",
            "train.evaluate_every=0.4",
        ]
        words += ["parallel.sync_fragments=2", f"parallel.sync_overlap={overlap}"]
        words += [] if ranks == replicas else HSDP.split()
        train(ranks, [*words, f"run.root={tmp_path}", "run.name=s"], tmp_path / f"logs-{number}")
    phases = [(replicas, steps) for _, replicas, steps in attempts]
    if len({replicas for replicas, _ in phases}) == 1:
        phases = phases[-1:]
    expected = by_hand(fresh(), phases, sync, fragments=fragments, overlap=overlap)
    check(RunDir(tmp_path, "s"), expected)


def test_one_replica_skips_a_step_alone(tmp_path: Path) -> None:
    words = [*WORDS, "parallel.sync=diloco", f"train.steps={STEPS}", "data.name=user_seldom:broken"]
    output = train(2, [*words, f"run.root={tmp_path}", "run.name=s"], tmp_path / "logs")
    assert "was skipped: a loss that is not finite" in output and "samples 7" in output
    expected = by_hand(fresh(), [(2, STEPS)], "diloco", user_seldom.broken)
    del expected["ema"]  # of the weights of each replica in the steps that it has taken
    check(RunDir(tmp_path, "s"), expected)


def test_a_killed_run_continues_in_the_middle_of_a_round(tmp_path: Path) -> None:
    words = [*WORDS, "parallel.sync=diloco", "train.steps=33", "checkpoint.every=3"]
    words += [f"run.root={tmp_path}", "run.name=s"]
    assert -9 in Ranks(2, words, tmp_path / "killed", {"CRASH": "32"}).wait()
    train(2, words, tmp_path / "logs")
    run_dir = RunDir(tmp_path, "s")
    [resumed] = [line for line in read_lines(run_dir.events) if line["event"] == "resumed"]
    assert resumed["step"] % EVERY
    check(run_dir, by_hand(fresh(), [(2, 33)], "diloco"))


def test_a_damaged_checkpoint_without_replicas_leaves_those_of_an_older_one(tmp_path: Path) -> None:
    for sync, steps in (("diloco", 8), ("step", 9), ("diloco", STEPS)):  # 8 is in mid-round
        words = [word for word in WORDS if "sync_every" not in word or sync != "step"]
        words += [f"parallel.sync={sync}", f"train.steps={steps}", f"run.root={tmp_path}"]
        train(2, [*words, "run.name=s"], tmp_path / f"logs-{steps}")
        if sync == "step":
            data = tmp_path / "s/checkpoints/step-00000009/rank-00000.bin"
            data.write_bytes(bytes(len(data.read_bytes())))
    check(RunDir(tmp_path, "s"), by_hand(fresh(), [(2, STEPS)], "diloco"))


def test_meetings_of_left_out_steps_are_held_after_the_next_one() -> None:
    """As after a rollback; and a round ends even if no weight is sent at its end."""
    world = World.join("cpu")
    try:
        words = ["parallel.sync=diloco", "parallel.sync_every=4", "parallel.sync_overlap=1"]
        _, config = parse([*words, "parallel.sync_fragments=2", "data.global_batch=2"])
        strategy = Strategy(config, world, Objective(losses.build("cross_entropy")))
        model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 9, bias=False))
        model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
        example: Any = torch.zeros(2, 2), torch.zeros(2, dtype=torch.long)
        strategy.place(model, example)
        outer = Outer(strategy, config.parallel, world.device)
        sent, ended = [], []
        for step in (1, 3, 4, 7, 8, 11):  # 2, 5, 6, 9 and 10 were left out
            before = {*outer._due.items()}
            ended += [step] * outer.meet(step)
            model[0].weight.requires_grad_(False)  # which changes no meeting
            sent += [step] * any(due for _, due in {*outer._due.items()} - before)
    finally:
        world.leave()
    assert ended == [4, 8] and sent == [3, 7, 11]


def count(rank: int, folder: Path) -> None:
    """Be a rank that notes what it sends in the steps of a run, and when the replicas meet."""
    compute, apply, meet = Gradient.compute, Updater.apply, Outer.meet
    sent = {"step": Collectives(), "meeting": Collectives()}

    def noted(function: Any, kind: str) -> Any:
        def run(*args: Any) -> Any:
            with sent[kind]:
                return function(*args)

        return run

    setattr(Gradient, "compute", noted(compute, "step"))  # noqa: B010
    setattr(Updater, "apply", noted(apply, "step"))  # noqa: B010
    setattr(Outer, "meet", noted(meet, "meeting"))  # noqa: B010
    words = [*WORDS, "parallel.sync=diloco", "train.steps=12", f"run.root={folder}", "run.name=s"]
    assert main([*words, *(HSDP.split() if folder.name == "hsdp" else [])]) == 0
    found = {kind: part.bytes for kind, part in sent.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 2), ("hsdp", 4)])
def test_a_step_sends_nothing_to_other_replicas(tmp_path: Path, name: str, ranks: int) -> None:
    folder = tmp_path / name
    folder.mkdir()
    together(ranks, count, folder)
    sent = json.loads((folder / "1.json").read_text())
    nbytes = sum(weight.nbytes for weight in fresh().parameters())
    assert sent["meeting"].keys() == {"allreduce_"}
    if name == "ddp":
        assert sent == {"step": {}, "meeting": {"allreduce_": 2 * nbytes}}
    else:  # FSDP2 inside a replica, the number of targets, and the norm
        assert sent["step"].pop("allreduce_") < 12 * 100
        assert all("gather" in kind or "scatter" in kind for kind in sent["step"])


@pytest.mark.parametrize("how", ["bf16", "int4"])
def test_compressed_meetings_stay_close(tmp_path: Path, how: str) -> None:
    words = [*WORDS, "parallel.sync=diloco", f"parallel.sync_compression={how}", "train.steps=10"]
    train(2, [*words, f"run.root={tmp_path}", "run.name=s"], tmp_path / "logs")
    saved = export.read(max(RunDir(tmp_path, "s").checkpoints.iterdir()))
    expected, start = by_hand(fresh(), [(2, 10)], "diloco"), dict(fresh().named_parameters())
    for name, tensor in expected["model"].items():
        error, moved = (saved["model"][name] - tensor).norm(), (tensor - start[name]).norm()
        assert 1e-5 < error / moved < (0.3 if how == "int4" else 0.01)


def test_4_bits_keep_numbers_within_half_a_step() -> None:
    numbers = torch.randn(1000) * torch.logspace(-6, 2, 1000)
    numbers[128:256] = 0
    message = pack(numbers)
    assert message.nbytes == 8 * (128 // 2 + 4)
    padded = torch.cat([numbers, torch.zeros(24)]).view(8, 128)
    limits = (padded.abs().amax(1, keepdim=True) / 14 * 1.001).expand(8, 128).reshape(-1)[:1000]
    assert ((unpack(message, 1000) - numbers).abs() <= limits).all()


@pytest.mark.campaign  # it compares times
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("tc"), reason="needs root and tc")
def test_a_slow_link_costs_replicas_that_meet_seldom_less(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The campaign behind a table of docs/seldom.md, with two of its ways on a slower link."""
    ways = {name: slow_link.WAYS[name] for name in ("`ddp`", "`diloco`, `sync_every=20`")}
    monkeypatch.setattr(slow_link, "WAYS", ways)
    assert slow_link.main(["--steps=4", "--every=2", "--mbit=20"]) == 0
    often, seldom = capsys.readouterr().out.splitlines()[-2:]
    assert " 1.0" in often and "`diloco`" in seldom, often
    # 20 Mbit/s carry the 7 MB of a gradient in about 3 seconds.
    assert re.search(r"` +[2-9](\.\d+)? s ", often) and re.search(r"` +\d+(\.\d+)? ms ", seldom), (
        seldom
    )
