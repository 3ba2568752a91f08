"""Checkpoints of several ranks: what one of them meets, all of them know."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import random_kills
import random_kills_of_trainings
import torch
import torch.distributed as dist
from checkpoints import restored, save
from disks import mounted, needs_root, run, until
from ranks import Ranks, logged_steps, together, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint import layout, manifest
from rollcall.train.checkpoint.engine import Engine, Hooks
from rollcall.train.checkpoint.store import CheckpointStore
from rollcall.train.checkpoint.tools import command, verify
from rollcall.train.ranks.world import World

WORDS = ["digits", "model.name=mlp", "log.every=1", "train.evaluate_every=null", "device=cpu"]


def test_trouble_of_one_rank_is_known_to_all(tmp_path: Path) -> None:
    together(2, _meet_trouble, tmp_path)
    first, second = (json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2))
    assert first == second
    assert "File too large" in first["problem"]
    assert first["step"] == 1 and first["refused"] == [
        [3, "rank-00001.bin is not what was written: model.sharded differs"]
    ]


def _state(filled: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.full((10, 300), filled), mesh, [Shard(0)])
    return {"model": {"sharded": sharded, "whole": torch.full((10_000,), filled)}}


def _meet_trouble(rank: int, place: Path) -> None:
    world = World.join("cpu")
    refused: list[tuple[int, str]] = []
    hooks = Hooks(on_refusal=lambda *refusal: refused.append(refusal))
    checkpoints = Engine(CheckpointStore(place / "checkpoints", world), hooks)
    save(checkpoints, 1, _state(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    checkpoints.begin(2, _state(2))
    outcome = checkpoints.drain()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save(checkpoints, 3, _state(3))
    dist.barrier()
    if rank == 0:
        data = bytearray((place / "checkpoints/step-00000003/rank-00001.bin").read_bytes())
        stored = json.loads((place / "checkpoints/step-00000003/manifest.json").read_text())
        [sharded] = [entry for entry in stored["tensors"] if entry["key"][-1] == "sharded"]
        [start] = [each["start"] for each in sharded["pieces"] if each["offset"] == [5, 0]]
        data[start] ^= 1
        (place / "checkpoints/step-00000003/rank-00001.bin").write_bytes(data)
    dist.barrier()
    found = restored(checkpoints, _state(0))
    assert outcome and found
    assert found[1]["model"]["sharded"].full_tensor().eq(1).all()
    result = {"problem": outcome.problem, "step": found[0], "refused": refused}
    (place / f"rank-{rank}").write_text(json.dumps(result))
    world.leave()


def test_a_run_goes_on_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "damaged")
    words = [*WORDS, "checkpoint.every=4", f"run.root={tmp_path}", "run.name=damaged"]
    train(2, [*words, "train.steps=8"], tmp_path / "logs")
    newest = layout.path_of(run_dir.checkpoints, 8)
    file = newest / "rank-00001.bin"
    file.write_bytes(bytes(file.stat().st_size))
    output = train(2, [*words, "train.steps=12"], tmp_path / "logs")
    assert f"{newest} is damaged and was set aside: rank-00001.bin is not what was" in output
    [refused] = [line for line in read_lines(run_dir.events) if line["event"] == "refused"]
    [resumed] = [line for line in read_lines(run_dir.events) if line["event"] == "resumed"]
    assert (refused["step"], resumed["step"]) == (8, 4)
    assert [line["step"] for line in logged_steps(run_dir)] == list(range(1, 13))
    names = {path.name for path in run_dir.checkpoints.iterdir()}
    assert names == {"damaged-step-00000008", "step-00000008", "step-00000012"}
    for place in layout.published(run_dir.checkpoints).values():
        file = place / "rank-00000.bin"
        file.write_bytes(bytes(file.stat().st_size))
    ranks = Ranks(2, [*words, "train.steps=16"], tmp_path / "logs")
    assert ranks.wait() == [2, 2]
    assert "holds no intact checkpoint" in ranks.output()
    assert "nothing was deleted" in ranks.output()
    assert len([*run_dir.checkpoints.iterdir()]) == 3


@needs_root
def test_a_full_disk_does_not_stop_the_training(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "full")
    words = [*WORDS, "checkpoint.every=5", "train.steps=15", f"run.root={tmp_path}"]
    words += ["run.name=full", "model.hidden_size=2500"]  # 2.2 MB
    with mounted(run_dir.checkpoints, "tmpfs", "3m"):
        ranks = Ranks(2, words, tmp_path / "logs")
        assert ranks.wait() == [1, 1]
        events = list(read_lines(run_dir.events))
        saves = [
            (line["event"], line["step"]) for line in events if line["event"] == "checkpointed"
        ]
        failures = [line for line in events if line["event"] == "save_failed"]
        assert saves == [("checkpointed", 5)]
        assert [line["step"] for line in failures] == [10, 15]
        assert all("No space left on device" in line["reason"] for line in failures)
        assert not verify.problems(layout.path_of(run_dir.checkpoints, 5))
        verdict = run_dir.read_verdict()
        assert verdict is not None and verdict.state == "failed"
        assert "15 steps trained; step 15 was not saved: [Errno 28]" in verdict.reason
        assert "failed saves" in ranks.output()
        run("mount", "-o", "remount,size=30m", run_dir.checkpoints)
        train(2, words, tmp_path / "logs")
        assert sorted(layout.published(run_dir.checkpoints)) == [10, 15]


def test_the_best_and_the_multiples_stay(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "best")
    words = [*WORDS, f"run.root={tmp_path}", "run.name=best", "train.epochs=4"]
    words += ["checkpoint.every=10", "checkpoint.keep_last=1", "checkpoint.keep_every=40"]
    words += ["checkpoint.keep_best=accuracy", "train.evaluate_every=0.5", "optim.lr=0.03"]
    train(1, words, tmp_path / "logs")
    worth = {
        line["step"]: line["accuracy"]
        for line in read_lines(run_dir.events)
        if line["event"] == "evaluated"
    }
    last = max(worth)  # the evaluation at the end counts, too
    best = max(worth, key=lambda step: (worth[step], -step))
    assert set(layout.published(run_dir.checkpoints)) == {40, 80, best, last}
    stored = manifest.read(layout.path_of(run_dir.checkpoints, best))
    assert stored.facts["metrics"]["accuracy"] == worth[best]
    newest = manifest.read(layout.path_of(run_dir.checkpoints, last))
    assert newest.facts["metrics"]["accuracy"] == worth[last]

    lines = [line for line in read_lines(run_dir.metrics) if "loss" not in line]
    assert {line["step"]: line["val_accuracy"] for line in lines} == worth
    assert all(line["val_loss"] > 0 for line in lines)


def test_the_final_evaluation_may_be_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, target = RunDir(tmp_path, "best"), tmp_path / "best.safetensors"
    words = [*WORDS, f"run.root={tmp_path}", "run.name=best", "data.global_batch=400"]
    words += ["train.steps=6", "checkpoint.every=2", "checkpoint.keep_last=1"]
    words += ["checkpoint.keep_best=loss", "train.evaluate_every=0.5"]  # every second step
    train(1, words, tmp_path / "logs")
    assert [*layout.published(run_dir.checkpoints)] == [6]  # the loss falls
    assert command.main(["export", str(run_dir.path), str(target), "--best"]) == 0
    assert re.search(r"step-00000006 \(val_loss [\d.]+, val_acc", capsys.readouterr().out)

    # It becomes worse: the best is not the newest.
    train(1, [*words, "train.steps=8", "optim.lr=9"], tmp_path / "logs")
    assert sorted(layout.published(run_dir.checkpoints)) == [6, 8]
    assert command.main(["export", str(run_dir.path), str(target), "--best"]) == 0
    assert "step-00000006" in capsys.readouterr().out
    assert command.main(["export", str(run_dir.path), str(target)]) == 0
    assert "step-00000008" in capsys.readouterr().out
    text = train(1, ["predict", str(run_dir.path), "--best", "device=cpu"], tmp_path / "predict")
    assert "predicted 359 of 359" in text
    plan = run_dir.path / "predictions.jsonl"
    hits = [line["prediction"] == line["target"] for line in read_lines(plan)]
    worth = {line["step"]: line for line in read_lines(run_dir.metrics) if "val_loss" in line}
    assert sum(hits) / len(hits) == pytest.approx(worth[6]["val_accuracy"], abs=1e-6)


def test_saved_by_the_clock(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path, "clock")
    words = [*WORDS, f"run.root={tmp_path}", "run.name=clock", "train.steps=1000000"]
    words += [
        "checkpoint.every=null",
        "checkpoint.every_minutes=0.003",
        "checkpoint.keep_last=10000",
    ]
    ranks = Ranks(2, words, tmp_path / "logs")

    def saves() -> list[dict[str, Any]]:
        return [line for line in read_lines(run_dir.events) if line["event"] == "checkpointed"]

    until(lambda: len(saves()) > 2)
    ranks.processes[0].terminate()
    assert ranks.wait() == [os.EX_TEMPFAIL] * 2
    saved = saves()
    assert {line["step"] for line in saved} == set(layout.published(run_dir.checkpoints))
    assert all(0 < line["stall"] <= line["seconds"] for line in saved)


@pytest.mark.long
def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    """The long form is `PYTHONPATH=.:tests/helpers python tests/campaigns/random_kills.py 200`."""
    print(random_kills.campaign(10, tmp_path, seed=1))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_random_kills_of_trainings_lose_nothing(tmp_path: Path) -> None:
    """Of submit, controllers, supervisors and ranks; the long form has 2,000, also on a lab."""
    print(random_kills_of_trainings.campaign(4, tmp_path, seed=1))
