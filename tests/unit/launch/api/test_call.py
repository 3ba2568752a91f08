"""The Python API before a run starts: pickles, words, refusals, the cost of an import."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

import rollcall
from rollcall.launch.api import call, job
from rollcall.records.run import LoggedStep, Validation, Verdict
from rollcall.records.run_dir import RunDir

NOBODY = 65534


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory with a module."""
    (tmp_path / "mine.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mine", None)


def test_the_import_is_cheap_and_lists_the_names() -> None:
    code = (
        "import sys, rollcall; print(*sorted({'torch', 'submitit', 'pydantic', 'cloudpickle'} "
        "& {*sys.modules}), *(name for name in dir(rollcall) if name[0] != '_'))"
    )
    command = [sys.executable, "-c", code]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"submit", "map", "run", "runs", "Job", "checkpoint_dir", "World"} < {*names.split()}
    assert not {"torch", "submitit", "pydantic", "cloudpickle"} & {*names.split()}


def test_a_star_import_keeps_the_names_of_python() -> None:
    assert "submit" in rollcall.__all__
    assert not {*dir(builtins)} & {*rollcall.__all__}


def test_a_pickle_comes_back_and_names_the_modules_of_the_user() -> None:
    import mine  # type: ignore[import-not-found]

    packed = call.pack((mine.double, [(1,)]))
    Path("f").write_bytes(packed)
    function, calls = call.load(Path("f"))
    assert function(*calls[0]) == 2
    assert call.modules(packed) == ["mine"]
    assert "mine" in (names := call.modules(call.pack((lambda: mine.double(json.loads("1")), []))))
    assert "json" not in names and "rollcall" not in names


def test_a_pickle_of_another_python_is_refused() -> None:
    Path("f").write_bytes(pickle.dumps("3.9") + pickle.dumps(1))
    with pytest.raises(rollcall.RefusedError, match=r"f is of Python 3.9, and this is 3.*same ver"):
        call.load(Path("f"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away: run it as root")
def test_a_pickle_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(Path.cwd()))
    run = RunDir("runs", "theirs")
    run.create()
    run.job.mkdir()
    (run.job / call.RESULT).write_bytes(call.pack(1))
    run.conclude(Verdict("done", 0, ""))
    assert rollcall.Job("theirs").result() == 1
    os.chown(run.job / call.RESULT, NOBODY, NOBODY)
    with pytest.raises(rollcall.RefusedError, match="belongs to nobody, which may run any code"):
        rollcall.Job("theirs").result()


def test_options_become_words() -> None:
    given = {"nodes": 2, "gpus_per_node": "h100:8", "exclusive": True, "mem": None, "local": False}
    more = {"link": ["a", "b"], "time": "2:00:00", "max_restarts": 0, "root": Path("é'x")}
    assert job._words({**given, **more}) == [
        *("--nodes=2", "--gpus-per-node=h100:8", "--exclusive", "--link=a", "--link=b"),
        *("--time=2:00:00", "--max-restarts=0", "--root=é'x"),
    ]


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((print,), {"nodes": "two"}, "^nodes: expected a whole number of at least 1, not 'two'$"),
        (
            (print,),
            {"gpu_per_node": 1},
            "^gpu_per_node: not an option .* did you mean 'gpus_per_node'",
        ),
        ((print,), {"time": "2h"}, "'2h' is not a valid Slurm time limit"),
        ((print,), {"name": "a b"}, "^name: expected letters, digits"),
        (("digits",), {"optim_lr": 1}, r"; add the argument 'optim\.lr=1' \(peak"),
        (("mine.py",), {"array": "0-3"}, "array: only the command line `rollcall submit` has this"),
        ((print,), {"dry_run": True}, "dry_run: only the command line `rollcall submit` has this"),
        ((print,), {"gpus_per_node": 64}, "would need 64 GPUs"),
        (("no.py",), {}, r"no.py: no such file; expected a script or -m module"),
        (("mine.py",), {"debug": True}, "only a function can be called in this process"),
        (("digits", "optim.lrr=1"), {}, "optim.lrr"),
    ],
)
def test_a_mistake_is_refused_with_the_sentence_of_the_command(
    arguments: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(rollcall.RefusedError, match=text):
        rollcall.submit(*arguments, **{"local": True, **options})
    assert not Path("runs").exists()


def test_a_refusal_is_short_and_lists_that_differ_are_refused() -> None:
    with pytest.raises(rollcall.RefusedError) as refusal:
        rollcall.submit(print, rank=2)
    assert len(refusal.traceback) <= 3 and "profile" not in str(refusal.value)
    refused: list[tuple[list[Any], dict[str, Any], str]] = [
        ([], {}, "map: expected a function and lists of one length"),
        ([[1, 2], [1]], {}, "lists of one length; list 2 is shorter than list 1"),
        ([5], {}, "lists of one length; 'int' object is not iterable"),
        ([print], {}, "lists of one length; 'builtin_function_or_method' object is not"),
        ([[1]], {"throttle": "two"}, "array 0-0%two: expected indices such as"),
    ]
    for lists, options, text in refused:
        with pytest.raises(rollcall.RefusedError, match=text):
            rollcall.map(print, *lists, **options)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'; it has Checkpointer, "):
        rollcall.Trainer  # noqa: B018


def test_debug_calls_the_function_in_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def look(value: int) -> int:
        print("in this process")
        folder = rollcall.checkpoint_dir()
        seen.append((value, os.getpid(), os.environ["RANK"], os.environ["WORLD_SIZE"], folder))
        return value + 1

    before = dict(os.environ)
    submitted = rollcall.submit(look, 1, nodes=2, local=True, debug=True, name="a")
    assert seen == [(1, os.getpid(), "0", "1", RunDir("runs", "a").checkpoints)]
    assert dict(os.environ) == before
    assert capsys.readouterr().out == "in this process\n"
    assert (submitted.state, submitted.result(), submitted.exception()) == ("done", 2, None)
    assert submitted.id is None and rollcall.run(look, 2, ranks=4, debug=True) == 3
    assert [run.result() for run in rollcall.map(look, [1, 2], local=True, debug=True)] == [2, 3]
    with pytest.raises(ZeroDivisionError):
        rollcall.submit(lambda: 1 / 0, local=True, debug=True)


def test_a_run_that_exists_is_not_taken_for_another_one() -> None:
    rollcall.submit(int, local=True, debug=True, name="a")
    with pytest.raises(rollcall.RefusedError, match=r"run a exists: rollcall.Job\('.*/runs/a'\)"):
        rollcall.submit(float, local=True, name="a")
    assert rollcall.Job("a").result() == 0


def test_wrong_words_are_refused_at_once(tmp_path: Path) -> None:
    run, lock = rollcall.submit(int, local=True, debug=True, name="a"), threading.Lock()
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: rollcall.run(int, ranks=0), "ranks: expected a number of ranks such as 4, got 0"),
        (lambda: run.wait("x"), "wait: expected seconds, such as 60, got 'x'"),  # type: ignore[arg-type]
        (
            lambda: rollcall.runs(str(tmp_path / "gone")),
            "/gone is not a folder; expected the one",
        ),
        (lambda: rollcall.run(lambda: lock), "'_thread.lock' object; a function, what it uses"),
        (lambda: rollcall.World(), r"write World.join\(\)"),
    ]
    for mistake, text in calls:
        with pytest.raises(rollcall.RefusedError, match=text):
            mistake()
    with pytest.raises(AttributeError, match="'sumbit', did you mean 'submit'"):
        rollcall.sumbit  # noqa: B018
    with pytest.raises(TypeError, match="expected a number or a tensor, got 'y'"):
        rollcall.measure("x", "y")  # type: ignore[arg-type]


def test_checkpoint_dir_belongs_to_a_rank() -> None:
    with pytest.raises(rollcall.RefusedError, match="this process is not a rank of a run; start"):
        rollcall.checkpoint_dir()


def test_runs_have_their_figures_as_lists() -> None:
    run = RunDir("runs", "a")
    run.create()
    run.config.write_text("optim: {lr: 0.5}\n")
    LoggedStep(1, 2.0, 10.0, 100.0).append(run.path)
    LoggedStep(2, 1.0, 11.0, 101.0, more={"lr": 0.5}).append(run.path)
    Validation(2, 0.5, 102.0).append(run.path)
    rollcall.submit(int, local=True, debug=True, name="b")
    first, second = sorted(rollcall.runs(), key=lambda job: job.run.name)
    assert (first.run.path, first.config) == (run.path, {"optim.lr": 0.5})
    assert first.metrics["loss"] == [2.0, 1.0] and first.metrics["lr"] == [None, 0.5]
    assert first.validations == {"step": [2], "val_loss": [0.5], "time": [102.0]}
    assert (second.run.name, second.state, second.metrics) == ("b", "done", {})
    assert second.config == {}


def test_jobs_are_found_by_name_or_refused() -> None:
    with pytest.raises(rollcall.RefusedError, match="there is no run 'x' in"):
        rollcall.Job("x")
    finished = rollcall.submit(int, local=True, debug=True, name="a")
    assert repr(rollcall.Job("a")) == f"<rollcall.Job {finished.run.path}: done>"
    with pytest.raises(rollcall.RefusedError, match="run a has no live job: done"):
        finished.cancel()
