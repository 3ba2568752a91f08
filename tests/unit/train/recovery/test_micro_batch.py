"""The search for the micro-batch that fits into memory, and for the fastest."""

import math
from pathlib import Path

import pytest
import torch

from rollcall.records.run_dir import RunDir
from rollcall.train.main import main
from rollcall.train.ranks.world import Place, World
from rollcall.train.recovery import memory
from rollcall.train.recovery.micro_batch import Trial, fastest, trials


@pytest.mark.parametrize("bends", [False, True])
@pytest.mark.parametrize("most", [1, 7, 100, 5000])
@pytest.mark.parametrize("fitting", [0, 1, 2, 63, 64, 65, 4000])
def test_the_largest_size_that_fits_is_found_within_a_sixteenth(
    fitting: int, most: int, bends: bool
) -> None:
    """Also where memory grows faster than samples, and is run out of."""

    def peak(size: int) -> float:
        return 1e9 + 1e6 * size * (size / fitting if bends and fitting else 1)

    limit = peak(fitting) if fitting else 1e9

    def trial(size: int) -> Trial:
        used = peak(size)
        return Trial(size, used if used < 1.5 * limit else math.inf, 1.0)  # more are faster

    tried = trials(trial, most, limit)
    found, largest = fastest(tried, limit), min(fitting, most)
    assert len(tried) <= 2 * math.log2(most + 1) + 3
    assert all(1 <= each.size <= most for each in tried)
    if not largest:
        assert found is None
        return
    assert found is not None
    assert largest - max(1, largest // 16) < found.size <= largest
    if not bends and fitting > 1:
        assert sum(each.peak > limit for each in tried) <= 1, "the line says what does not fit"


def test_of_nearly_equal_sizes_the_largest_is_fastest() -> None:
    tried = [Trial(1, 1.0, 1.0), Trial(8, 8.0, 2.0), Trial(16, 16.0, 4.1), Trial(32, 32.0, 16.0)]
    assert fastest(tried, 20.0) == tried[2]
    assert fastest(tried, 8.0) == tried[1]


def test_a_run_keeps_the_micro_batch_that_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["digits", "data.micro_batch=auto", "device=cpu", "data.global_batch=24"]
    words += [f"run.root={tmp_path}", "run.name=a"]
    assert main([*words, "train.steps=2"]) == 0
    first = capsys.readouterr().out
    assert "the fastest that fits" in first
    line = next(line for line in first.splitlines() if "data.micro_batch=" in line)
    chosen = line.partition("data.micro_batch=")[2].partition(",")[0]
    assert f"micro_batch: {chosen}" in RunDir(tmp_path, "a").config.read_text()
    assert main([*words, "train.steps=4"]) == 0
    again = capsys.readouterr().out
    assert f"data.micro_batch={chosen}, because an earlier attempt found it" in again
    assert [line.step for line in RunDir(tmp_path, "a").read_metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("micro-batch.json", '{"micro_batch": -5}'),
        ("micro-batch.json", '{"micro_batch": 0}'),
        ("left-out.json", '{"a": 1}'),
        ("left-out.json", '[1, "b", null]'),
        ("left-out.json", "7"),
    ],
)
def test_what_a_run_kept_about_its_faults_may_be_damaged(
    tmp_path: Path, file: str, text: str
) -> None:
    faults = tmp_path / "a" / "faults"
    faults.mkdir(parents=True)
    (tmp_path / "a").chmod(0o700)
    (faults / file).write_text(text)
    words = [f"run.root={tmp_path}", "run.name=a", "device=cpu", "train.steps=4"]
    assert main(["digits", *words]) == 0
    assert len([*RunDir(tmp_path, "a").read_metrics()]) > 0


def test_the_cache_of_files_is_free_memory_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "GROUPS", str(tmp_path))
    (tmp_path / "memory.max").write_text("9000000\n")
    (tmp_path / "memory.current").write_text("8000000\n")
    (tmp_path / "memory.stat").write_text("anon 2000000\nfile 6000000\nshmem 1000000\n")
    world = World(Place("plan", world_size=2, local_world_size=2), torch.device("cpu"))
    assert memory.free(world) == 3_000_000
