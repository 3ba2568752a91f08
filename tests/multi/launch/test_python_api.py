"""Runs that a Python program starts on this machine, waits for, ends and reads."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import rollcall

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import it

ONE: dict[str, Any] = {"local": True, "nproc_per_node": 1}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a module."""
    (tmp_path / "mine.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def quick(bare: str) -> dict[str, Any]:
    """One rank of an environment without torch."""
    return {**ONE, "python": bare.partition("=")[2]}


def add(*numbers: float) -> dict[str, Any]:
    """Add up numbers, and then the ranks, all of which must be there."""
    import mine  # type: ignore[import-not-found]
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, int(os.environ["RANK"]))
    print(f"rank {dist.get_rank()} of {ranks}", flush=True)
    dist.destroy_process_group()
    return {"sum": mine.double(sum(numbers)), "ranks": ranks, "directory": Path.cwd()}


def test_a_function_runs_on_two_nodes() -> None:
    submit = rollcall.submit  # the import of rollcall's modules sets variables
    before = dict(os.environ)
    job = submit(add, 1, 2.5, nodes=2, local=True, nproc_per_node=2, name="a")
    assert job.state == "running" and job.id and job.id.isdecimal()
    result = job.result(timeout=500)
    assert result["sum"] == 7.0 and result["ranks"] == [0, 1, 2, 3]
    assert result["directory"] == job.run.code
    assert (job.state, job.wait(), job.exception()) == ("done", "done", None)
    assert "rank 0 of [0, 1, 2, 3]" in job.logs() and "rank 3" in job.logs(rank=3)
    assert "[rank 2] rank 2 of" in job.logs(merge=True)
    assert rollcall.Job("a").result() == result
    assert dict(os.environ) == before
    assert {path.stat().st_mode & 0o077 for path in (job.run.path, job.run.path.parent / "a")} == {
        0
    }


def test_the_first_cause_is_the_exception() -> None:
    def fail() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("the data is missing")
        dist.barrier()

    job = rollcall.submit(fail, local=True, nproc_per_node=2)
    error = job.exception(timeout=500)
    assert job.state == "failed" and isinstance(error, rollcall.RunError)
    first, *rest = str(error).splitlines()
    assert "rank 1 on" in first and first.endswith("raised ValueError: the data is missing")
    assert any(line.endswith("]: ValueError: the data is missing") for line in rest)
    with pytest.raises(rollcall.RunError, match=r"rank 1 .*the data is missing"):
        job.result()


def sleep() -> None:
    print("it is up", flush=True)
    time.sleep(600)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 500
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def up(job: rollcall.Job) -> bool:
    return job.run.log(0, 0, 0).exists() and "it is up" in job.logs()


@pytest.mark.long
def test_a_run_is_waited_for_and_cancelled(quick: dict[str, Any]) -> None:
    text = "import time; print('it is up', flush=True); time.sleep(600)"
    Path("sleep.py").write_text(text)
    job = rollcall.submit(Path("sleep.py"), **quick)
    with pytest.raises(TimeoutError, match=r"run sleep-\S+ is running after 0.1 s"):
        job.wait(0.1)
    until(lambda: up(job))
    job.cancel()
    assert job.wait(500) == "stopped"
    with pytest.raises(rollcall.RunError, match="has not failed: stopped"):
        job.result()


@pytest.mark.long
def test_map_starts_an_array_and_awaits_it() -> None:
    def scaled(number: int, factor: int) -> int:
        print("number", number)
        if number == 2 and not (rollcall.checkpoint_dir() / "seen").exists():
            (rollcall.checkpoint_dir() / "seen").touch()
            raise RuntimeError("the first time")
        return number * factor

    numbers, factors = [1, 2, 3], [10, 20, 30]
    jobs = rollcall.map(scaled, numbers, factors, **ONE, throttle=1, name="m")
    assert {job.state for job in jobs} <= {"pending", "running"}
    assert [job.wait(500) for job in jobs] == ["done", "failed", "done"]
    assert "raised RuntimeError: the first time" in str(jobs[1].exception())
    array = rollcall.Job("m")
    until(lambda: array.state not in ("pending", "running"))
    again = rollcall.map(scaled, numbers, factors, **ONE, name="m", resume=True)

    async def together() -> list[int]:
        return list(await asyncio.gather(*again))

    assert asyncio.run(together()) == [10, 40, 90]
    assert [job.logs().count("number") for job in again] == [1, 1, 1]
    assert len(rollcall.runs()) == 3


@pytest.mark.long
def test_a_task_that_has_not_begun_waits_and_ends_with_its_array() -> None:
    jobs = rollcall.map(lambda _: sleep(), [0, 1], **ONE, throttle=1)
    until(lambda: up(jobs[0]))
    assert [job.state for job in jobs] == ["running", "pending"]
    assert jobs[1].id == rollcall.Job(jobs[0].run.path.parent).id
    rollcall.Job(jobs[0].run.path.parent).cancel()
    assert [job.wait(500) for job in jobs] == ["stopped", "stopped"]
    assert "has no result: it is stopped" in str(jobs[1].exception())


@pytest.mark.long
def test_a_killed_rank_goes_on_with_what_it_saved() -> None:
    def count(steps: int) -> list[int]:
        state = rollcall.checkpoint_dir() / "steps"
        before = state.read_text().split() if state.exists() else []
        for step in range(len(before), steps):
            with state.open("a") as file:
                file.write(f"{os.getpid()} ")
            if step == 2 and not before:
                os.kill(os.getpid(), signal.SIGKILL)
        return [int(pid) for pid in state.read_text().split()]

    job = rollcall.submit(count, 5, **ONE, max_restarts=1)
    pids = job.result(timeout=500)
    assert len(pids) == 5 and len(set(pids[:3])) == len(set(pids[3:])) == 1 < len(set(pids))
    job = rollcall.submit(count, 5, **ONE, name="b")
    assert "rank 0 on" in (cause := str(job.exception(500))) and "SIGKILL" in cause
    again = rollcall.submit(count, 5, **ONE, name="b", resume=True)
    assert len(again.result(timeout=500)) == 5


@pytest.mark.long
def test_run_shows_the_output_and_returns_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    class Answer:
        """A class of the program's own."""

        def __init__(self, value: int) -> None:
            self.value = value

    def answer() -> Answer:
        print("of rank", os.environ["RANK"], flush=True)
        return Answer(42)

    result = rollcall.run(answer, ranks=2)
    assert isinstance(result, Answer) and result.value == 42
    assert "of rank 0" in capfd.readouterr().out
    with pytest.raises(rollcall.RunError, match="raised ZeroDivisionError"):
        rollcall.run(lambda: 1 // 0, ranks=1)


@pytest.mark.long
def test_a_script_a_module_and_a_recipe(quick: dict[str, Any]) -> None:
    Path("script.py").write_text("import sys; print('arguments', *sys.argv[1:])\n")
    started = [
        rollcall.submit(Path("script.py"), "--lr", 0.1, **quick),
        rollcall.submit("-m", "script", 7, **quick),
        rollcall.submit("digits", "train.steps=3", "device=cpu", **ONE),
    ]
    assert [job.result(timeout=500) for job in started] == [None, None, None]
    assert "arguments --lr 0.1" in started[0].logs() and "arguments 7" in started[1].logs()
    assert any(job.validations.get("val_loss") for job in rollcall.runs())


def test_a_thread_can_submit(quick: dict[str, Any]) -> None:
    Path("script.py").write_text("print('of a thread')")
    jobs = list[rollcall.Job]()
    thread = threading.Thread(
        target=lambda: jobs.append(rollcall.submit(Path("script.py"), **quick))
    )
    thread.start()
    thread.join(500)
    assert (jobs[0].wait(500), "of a thread" in jobs[0].logs()) == ("done", True)
