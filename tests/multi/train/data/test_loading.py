"""Workers change nothing but the speed: not the samples, not the stops, not the faults."""

from __future__ import annotations

import os
import signal
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
from disks import until
from PIL import Image
from ranks import Ranks, logged_steps, train
from user_datasets import SIZE, Noisy

from rollcall.config.schema import ConfigError, Data
from rollcall.launch.node.processes import children
from rollcall.records.run_dir import RunDir
from rollcall.train.data import workers as crew
from rollcall.train.data.loading import Loading
from rollcall.train.data.order import Order, training_batches
from rollcall.train.data.reader import ReadResult
from rollcall.train.data.sets import vision
from rollcall.train.data.source import Batch, Source
from rollcall.train.data.workers import in_order
from rollcall.train.ranks.clock import DATA, clock
from rollcall.train.ranks.signals import PERSON, SCHEDULER
from rollcall.train.ranks.world import World

SOURCE = Source(Noisy(), Noisy(), SIZE, SIZE, (1, 8, 8), 10)
ORDER = Order(SIZE, total=5 * SIZE, global_batch=16, seed=1)


def batches(workers: int, rows: range = range(16), first: int = 0) -> list[Batch]:
    loading = Loading(Data(num_workers=workers), seed=7)
    steps = range(first, ORDER.steps)
    return list(training_batches(SOURCE, ORDER, rows, steps, loading))


def equal(some: list[Batch], others: list[Batch]) -> bool:
    return len(some) == len(others) and all(
        torch.equal(tensor, other)
        for batch, same in zip(some, others, strict=True)
        for tensor, other in zip(batch, same, strict=True)
    )


def test_samples_and_what_they_draw_do_not_depend_on_workers_ranks_or_restarts() -> None:
    alone = batches(0)
    assert not torch.equal(alone[0].inputs, alone[1].inputs)
    assert equal(batches(1), alone)
    assert equal(batches(2, first=5), alone[5:])
    halves = zip(batches(0, range(8)), batches(2, range(8, 16)), strict=True)
    assert equal([Batch(*map(torch.cat, zip(*pair, strict=True))) for pair in halves], alone)


def test_killed_workers_are_named_and_replaced_and_signals_do_not_end_them(
    capfd: pytest.CaptureFixture[str],
) -> None:
    loading = Loading(Data(num_workers=2), seed=7, rank=3)
    others = psutil.Process().children()  # such as the server that forks the ranks of other tests
    read: list[Batch] = []
    killed: list[int] = []
    for batch in training_batches(SOURCE, ORDER, range(16), range(ORDER.steps), loading):
        workers = [child for child in psutil.Process().children() if child not in others]
        if len(read) in (2, 8):
            for worker in workers:
                worker.kill()
                killed.append(worker.pid)
        for worker in workers[:1]:  # none is left when the last batch has been read
            for number in PERSON | SCHEDULER:
                worker.send_signal(number)
        read.append(batch)
    assert equal(read, batches(0))
    error = capfd.readouterr().err
    for pid in killed:
        assert f"of rank 3 (pid {pid}) was killed by SIGKILL; restarted" in error
    assert error.count("restarted") == 4
    assert psutil.Process().children() == others


def test_batches_of_any_size_come_through() -> None:
    def fetch(number: int) -> ReadResult:
        rows = 1 + number * 1000
        inputs = {"x": torch.rand(rows, 3), "boxes": torch.zeros(rows, 0, 4)}
        batch = Batch(inputs, torch.arange(rows), torch.ones(rows))
        return ReadResult(batch, [(number, "a problem")])

    for number, (batch, problems, _) in enumerate(in_order(fetch, range(7), workers=2, ahead=2)):
        assert batch.targets.tolist() == [*range(1 + number * 1000)]
        assert batch.inputs["boxes"].shape == (1 + number * 1000, 0, 4)
        assert problems == [(number, "a problem")]


def test_a_worker_that_dies_in_the_middle_of_an_answer_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that the machine kills while a large batch waits in the pipe."""
    reply = crew._reply

    def torn(pipe: Connection, answer: object) -> None:
        if not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.write(pipe.fileno(), struct.pack("!i", 1000) + b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        reply(pipe, answer)

    def fetch(number: int) -> ReadResult:
        return ReadResult(Batch(torch.ones(1), torch.tensor([number]), torch.ones(1)), [])

    monkeypatch.setattr(crew, "_reply", torn)
    read = [int(batch.targets) for batch, *_ in in_order(fetch, range(4), workers=1, ahead=1)]
    assert read == [0, 1, 2, 3] and (tmp_path / "died").exists()


def test_shares_of_a_count_that_do_not_add_up_exactly_are_not_one_more() -> None:
    sums = torch.zeros(())
    for _ in range(6):  # ranks that hold parts of one replica
        sums += torch.tensor(13 / 6)
    assert sums > 13
    loading = Loading(Data(skip_unreadable=13))
    loading._problem = "rank 0 cannot read sample 7"
    world = World.join("cpu")
    try:
        loading.refuse(world, sums.item())
        with pytest.raises(ConfigError, match="sample 7"):
            loading.refuse(world, 14)
    finally:
        world.leave()


class Archived:
    """As torchvision's CIFAR; while it is downloaded another run has it in its place."""

    base_folder, filename = "unpacked", "archive"

    def __init__(self, root: str, download: bool) -> None:
        assert download
        for place in (Path(root), Path(root).parent):
            (place / self.base_folder).mkdir()
            (place / self.base_folder / "file").touch()


def test_two_runs_that_download_at_once_both_have_it(tmp_path: Path) -> None:
    assert vision._download(Archived, Data(name="cifar10"), tmp_path) == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["unpacked", "file"]


class Slow(Noisy):
    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return super().__getitem__(row)


def test_the_time_in_which_a_rank_waits_is_measured() -> None:
    source = Source(Slow(), Slow(), SIZE, SIZE, (1, 8, 8), 10)
    loading, paused = Loading(), 0.0
    before, began = clock.totals()[1][DATA], time.perf_counter()
    with clock.running(torch.device("cpu")):
        for _ in training_batches(source, ORDER, range(10), range(5), loading):
            started = time.perf_counter()
            time.sleep(0.2)
            paused += time.perf_counter() - started
        clock.step()
    waited = clock.totals()[1][DATA] - before
    assert 0.1 <= waited <= time.perf_counter() - began - paused


def test_a_sample_that_kills_its_workers_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    words = [
        "digits",
        "data.name=user_datasets:deadly",
        "data.global_batch=4",
        "model.hidden_size=8",
    ]
    words += [f"run.root={tmp_path}", "run.name=deadly", "data.num_workers=1", "train.epochs=1"]
    ranks = Ranks(2, words, tmp_path / "logs")
    assert ranks.wait() == [1, 1], ranks.output()  # the request was not wrong
    errors = [line for line in ranks.output().splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "was killed by SIGKILL, 3 times while reading batch" in errors[0]
    assert "reduce data.num_workers" in errors[0]
    verdict = RunDir(tmp_path, "deadly").read_verdict()
    assert verdict is not None and "data worker 0 of rank" in verdict.reason


def test_an_exact_evaluation_without_its_workers_ends_the_run(tmp_path: Path) -> None:
    words = ["digits", "data.name=user_datasets:deadly_at_the_end", "data.global_batch=4"]
    words += ["model.hidden_size=8", "exact=true", "exact_shards=2", "train.steps=1"]
    words += [f"run.root={tmp_path}", "run.name=deadly", "data.num_workers=1"]
    ranks = Ranks(1, words, tmp_path / "logs")
    assert ranks.wait() == [1], ranks.output()
    assert "was killed by SIGKILL, 3 times while reading batch" in ranks.output()


WORDS = [
    "digits",
    "data.name=user_datasets:noisy",
    "model.name=user_code:gated",
    "data.global_batch=7",
    "log.every=1",
    "model.hidden_size=8",
]

"""Batches of 7 end where epochs of 60 do in step 60 alone: a stop is in the middle of one."""


def losses(run_dir: RunDir) -> list[float]:
    return [line["loss"] for line in logged_steps(run_dir)]


@pytest.mark.long
def test_signal_to_whole_process_groups_with_workers_saves_and_resumes_exactly(
    tmp_path: Path,
) -> None:
    words = [*WORDS, f"run.root={tmp_path}", "train.steps=40", "checkpoint.every=null"]
    train(4, [*words, "run.name=whole"], tmp_path / "logs")
    run_dir = RunDir(tmp_path, "parts")
    with_workers = [*words, "run.name=parts", "data.num_workers=1"]
    gate = tmp_path / "gate"  # in the 20th pass, and so before step 21, they wait for it
    ranks = Ranks(4, with_workers, tmp_path / "logs", {"GATE": f"20:300:{gate}"})
    until(lambda: len(losses(run_dir)) >= 8)
    for process in ranks.processes:
        assert process.pid is not None
        # Not psutil's list: it leaves children out if the clock is set while it reads.
        assert len(children(process.pid)) == 1
        os.killpg(process.pid, signal.SIGTERM)
    gate.touch()
    assert ranks.wait() == [os.EX_TEMPFAIL] * 4, ranks.output()
    assert "restarted" not in ranks.output()
    verdict = run_dir.read_verdict()
    assert verdict is not None and (run_dir.checkpoints / f"step-{verdict.step:08d}").exists()
    train(4, with_workers, tmp_path / "logs")
    assert losses(run_dir) == losses(RunDir(tmp_path, "whole"))
    assert all(0 <= line["data_wait"] <= 1 for line in logged_steps(run_dir))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes of twenty small images; sample 6 of the training data is cut off."""
    for name, grey in (("dark", 40), ("light", 200)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(20):
            image = Image.new("RGB", (12, 10), (grey, grey + number, grey))
            image.save(tmp_path / "pictures" / name / f"{number:02d}.png")
    broken = tmp_path / "pictures" / "dark" / "07.png"
    broken.with_suffix(".whole").write_bytes(broken.read_bytes())
    broken.write_bytes(broken.read_bytes()[:40])
    return tmp_path / "pictures"


@pytest.mark.long
def test_unreadable_sample_is_named_once_and_the_run_goes_on_when_it_is_mended(
    tmp_path: Path, pictures: Path
) -> None:
    words = ["digits", "data.name=folder", f"data.path={pictures}", "data.image_size=8"]
    words += ["data.global_batch=4", "data.num_workers=1", "train.epochs=1", "log.every=1"]
    words += [f"run.root={tmp_path}", "model.hidden_size=8", "checkpoint.every=1"]
    ranks = Ranks(2, [*words, "run.name=strict"], tmp_path / "logs")
    assert ranks.wait() == [2, 2], ranks.output()
    errors = [line for line in ranks.output().splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "cannot read sample 6 of the training data" in errors[0]
    assert f"({pictures}/dark/07.png)" in errors[0] and "data.skip_unreadable=N" in errors[0]
    assert "Traceback" not in ranks.output()

    output = train(2, [*words, "run.name=lenient", "data.skip_unreadable=1"], tmp_path / "logs")
    assert "skips sample 6 of the training data" in output
    run_dir = RunDir(tmp_path, "lenient")
    assert [line.get("unreadable") for line in logged_steps(run_dir)][-1] == 1

    broken = pictures / "dark" / "07.png"
    broken.with_suffix(".whole").rename(broken)
    train(2, [*words, "run.name=strict"], tmp_path / "logs")
    assert len(losses(RunDir(tmp_path, "strict"))) == 8

    (pictures / "dark" / "00.png").write_bytes((pictures / "light" / "00.png").read_bytes())
    ranks = Ranks(2, [*words, "run.name=strict", "train.epochs=2"], tmp_path / "logs")
    assert ranks.wait() == [2, 2]
    assert "was trained on different data: 1 of 16 compared samples" in ranks.output()
    (pictures / "dark" / "00.png").unlink()
    ranks = Ranks(2, [*words, "run.name=strict", "train.epochs=2"], tmp_path / "logs")
    assert ranks.wait() == [2, 2]
    assert (
        "train was 32, is 32" not in ranks.output() and "validation was 8, is 7" in ranks.output()
    )
