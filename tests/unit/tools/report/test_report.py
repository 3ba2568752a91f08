"""Reports, comparisons and the dashboard, of run directories written here."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT
from made_runs import add_phases

from rollcall.cli import program as cli
from rollcall.launch.commands import profile, watch
from rollcall.messages.refusal import RefusedError
from rollcall.messages.text import duration, fixed
from rollcall.records.attempt import AttemptEvent, RankFailure
from rollcall.records.job import Cell, JobRecord, Restart, Submission
from rollcall.records.phases import Phases
from rollcall.records.run import LoggedStep, Validation, Verdict
from rollcall.records.run_dir import RunDir
from rollcall.system.files import append_line
from rollcall.tools.report import charts, command, compare, curves, dashboard, story
from rollcall.tools.report.dashboard import Server

EVIL = "</script><script>alert(1)</script>"


def make(root: Path, name: str, loss: float = 0.5, lr: str = "0.1") -> RunDir:
    """A run of 20 steps that is done, with a configuration."""
    run = RunDir(root, name)
    run.create()
    run.job.mkdir()
    run.config.write_text(f"optim:\n  lr: {lr}\n  args: {{eps: 1.0e-08}}\nseed: 0\n")
    for step in range(1, 21):
        more = {"lr": 0.1, "grad_norm": 1.0}
        LoggedStep(step, loss + 1 / step, 100.0, 1000.0 + step, more=more).append(run.path)
    Validation(20, loss, 1020.0, 0.9).append(run.path)
    run.record("checkpointed", step=10, seconds=0.1)
    run.record("evaluated", step=20, seconds=0.1, loss=loss, accuracy=0.9)
    Verdict("done", 20, "20 steps trained").write(run.path)
    return run


def report(run: RunDir) -> str:
    return command.build([str(run.path)], ".")[0]


def test_a_curve_of_many_steps_keeps_its_extremes() -> None:
    points = [(step, 1.0 + (step == 54_321) * 9 - (step == 7) * 5) for step in range(100_000)]
    curve = curves.thin(points)
    assert len(curve.x) == curves.COLUMNS
    assert (curve.high.max(), curve.low.min()) == (10, -4)
    assert curve.ends == ((0, 1.0), (99_999, 1.0))
    assert not curves.thin(points[:100]).is_band


@pytest.mark.parametrize(("ranks", "group"), [(6, 1), (300, 4)])
def test_the_heat_map_shows_a_slow_rank(tmp_path: Path, ranks: int, group: int) -> None:
    run = make(tmp_path, "slow")
    add_phases(run, 120, ranks)
    with (run.path / Phases.FILE).open("a") as file:
        file.write('{"step": 1, "phases": {"data": "none"}}\n[]\n{"cut')  # no reader minds
    found = curves.timing(run)
    assert found is not None
    assert (found.ranks, found.group) == (ranks, group)
    late = found.own[:, -1] > 0.05
    assert late[5 // group] and late.sum() == 1
    assert not (found.own[:, 0] > 0.05).any()
    # The phases of all ranks add up to the time of a step.
    assert found.by_rank.sum(0).mean() == pytest.approx(0.0735, rel=0.05)
    assert found.memory["peak in use"].max() > 7e10


def test_numbers_of_layers_are_heat_maps(tmp_path: Path) -> None:
    run = make(tmp_path, "layers")
    for step in range(21, 400):
        layers = {f"load/block{n}.experts": 1 + 7 * (n == 2 and step == 300) for n in range(11)}
        others = {"speed/up": 1.0, "size": 3.0, "size/half": 1.5}
        more: dict[str, float | None] = {"load": 8.0, **others, **layers}
        LoggedStep(step, 1.0, 100.0, 1000.0 + step, more=more).append(run.path)
    text = report(run)
    assert "The largest value is 8." in text
    assert text.count("<h3>Load") == 2  # the curve and the map
    assert "<h3>Load by part" in text  # and not of a layer: they may be anything of the user's
    assert "<h3>Speed/up" in text  # no curve "speed": it is a curve as before
    assert "<h3>Size/half" in text and "Size by" not in text  # a single part is a curve, too
    names = json.loads(re.findall(r'"names":(\[.*?\])', text)[0])
    assert names == [f"block{n}.experts" for n in range(11)]


def test_a_run_on_fewer_ranks_after_a_restart(tmp_path: Path) -> None:
    run = make(tmp_path, "shrunk")
    for step, ranks in ((1, 4), (2, 2)):
        phases = {name: [0.1] * ranks for name in Phases.PHASES}
        Phases(step, 1, 0.0, 0.6, phases, [1e9] * ranks).append(run.path)
    found = curves.timing(run)
    assert found is not None and found.own.shape == (4, 2)
    assert found.own[:2].tolist() == [[0.5, 0.5]] * 2
    assert found.own[2:, 0].tolist() == [0.5, 0.5] and all(x != x for x in found.own[2:, 1])
    assert found.by_rank[0].tolist() == pytest.approx([0.1] * 4)
    assert "Step time by rank" in report(run)


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    run = make(tmp_path, "again")
    for step, seconds in ((10, 0.1), (20, 0.9), (15, 0.2), (20, 0.2)):
        phases = {name: [seconds] for name in Phases.PHASES}
        Phases.forget_after(run.path, step - (5 if step == 15 else 10))
        Phases(step, 5 if step == 15 else 10, 0.0, 6 * seconds, phases).append(run.path)
    found = curves.timing(run)
    assert found is not None and found.steps.tolist() == [10, 20]
    assert found.over_time[0].tolist() == pytest.approx([0.1, 0.2])


def test_what_comes_from_files_is_text_in_a_report(tmp_path: Path) -> None:
    name = "<script>alert(2)<!--"  # a slash cannot be in a name
    run = make(tmp_path, name, lr=json.dumps(EVIL))
    LoggedStep(21, 0.1, 1.0, 1.0, more={EVIL: 1.0}).append(run.path)
    run.record("failed", step=5, reason=EVIL)
    Submission("7", 1.0, [EVIL], EVIL, {EVIL: EVIL}).append(run.path)
    AttemptEvent(0, "7", "started", 1.0, hosts=[EVIL], ranks=1).append(run.path)
    AttemptEvent(0, "7", "ended", 2.0, state="failed", exit_code=1).append(run.path)
    log = run.log(0, 0, 0)
    log.parent.mkdir(parents=True)
    log.write_text(f"{EVIL}\n")
    RankFailure(1.5, EVIL, 1, f"Error: {EVIL}", 0).write(log.parent, who="rank-0")
    Verdict("failed", 5, EVIL).write(run.path)
    text = report(run)
    starts = re.findall(r"<script[^>]*>", text)
    assert {*starts} == {"<script>", '<script type="application/json">'}
    assert starts.count("<script>") == 1 and "alert(" in text  # the values are there, escaped
    assert not re.search(r"<script>alert|<!--", text)
    for data in re.findall(r'<script type="application/json">(.*?)</script>', text, re.S):
        json.loads(data)
    other = make(tmp_path, "other")
    both, count = command.build([str(run.path), str(other.path)], ".")
    assert count == 2
    assert both.count("<script>") == 1


def test_a_report_says_what_is_missing_or_damaged(tmp_path: Path) -> None:
    run = RunDir(tmp_path, "script")
    run.create()
    run.job.mkdir()
    assert "no lines of steps in metrics.jsonl" in report(run)
    run.metrics.write_text('{"step": 1, "lo\n[1]\n{"step": "x", "loss": NaN}\n')
    run.events.write_text('{"event": "checkpointed", "time": 1, "step": 1e400}\n\x00\n')
    run.config.write_text("a: [")
    (run.path / Phases.FILE).write_bytes(b"\xff\n{}\n")
    Verdict.path_in(run.path).write_text("{")
    assert "no lines of steps in metrics.jsonl" in report(run)
    huge = {"loss": float("inf"), "step": 10**30, "lr": 10**400, "grad_norm": float("nan")}
    for step in ({"step": 1}, {"step": 2}, {}):
        line = {"samples_per_second": 1.0, "time": 1e300, **huge, **step, "a": {}, "b": True}
        with run.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
    phases = {name: [float("inf"), -1.0, 10**400] for name in Phases.PHASES}
    lines = [Phases(step, step, 0.0, 1.0, phases).as_dict() for step in (1, 10**400)]
    (run.path / Phases.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    AttemptEvent(0, "7", "started", 1e300, hosts=["a"], ranks=1).append(run.path)
    assert "<figure" in report(run)
    phases = {name: [math.nan] for name in Phases.PHASES}
    (run.path / Phases.FILE).write_text(json.dumps(Phases(1, 1, 0.0, 1.0, phases).as_dict()))
    assert "Step time by rank" in report(run)


@pytest.mark.parametrize("number", [10**400, math.inf, math.nan])
def test_a_number_out_of_range_stops_no_command(tmp_path: Path, number: float) -> None:
    run = make(tmp_path, "damaged")
    whole = {"time": 2000.0, "step": 30, "steps": 99, "seconds": 1.0, "data_wait": 0.1}
    for key in whole:
        for event in ("started", "first_step", "evaluated", "rolled_back", "finished"):
            append_line(run.events, {**whole, "event": event, key: number})
        line = {**whole, "loss": 1.0, "samples_per_second": 1.0, key: number}
        append_line(run.metrics, line)
    assert cli.main(["status", "--root", str(tmp_path)]) == 0
    assert watch.lines(run, 80)
    (told,) = story.tell([run])
    assert told.goodput is not None and 0 <= told.goodput.productive <= 1


def test_failures_show_their_log_and_attempts_their_changes(tmp_path: Path) -> None:
    run = make(tmp_path, "restarted")
    for number, (job, hosts) in enumerate((("7", [*"abcdefg"]), ("8", [*"abcdefh"]))):
        Submission(job, 1.0, versions={"torch": f"2.1{number}"}).append(run.path)
        at = 100.0 * number
        AttemptEvent(number, job, "started", at, hosts=hosts, ranks=4).append(run.path)
    AttemptEvent(0, "7", "ended", 50.0, state="failed", exit_code=1).append(run.path)
    AttemptEvent(1, "8", "ended", 150.0, state="finished", exit_code=0).append(run.path)
    Restart(60.0, "7", "crash", 10).append(run.path)
    log = run.log(0, 1, 3)
    log.parent.mkdir(parents=True)
    log.write_text("before\nthe last words\n")
    RankFailure(40.0, "b", 1, "ValueError: broken", 3).write(log.parent, who="rank-3")
    run.record("failed", step=27)  # seven steps after the last line
    run.record("straggler", step=9)  # a busy machine has hundreds, which would hide the curves
    text = report(run)
    assert '[27,"failed at step 27"]' in text and "straggler at" not in text
    assert "rank 3 on b (node 1) raised ValueError: broken" in text
    assert "the last words" in text
    assert (
        "restart: crash" in text
        and "torch 2.10 → 2.11" in text
        and "nodes a,b,c,d,e,f,g → a,b,c,d,e,f,h" in text
    )


def test_steps_done_again_are_a_band_and_no_restart_before_the_fault(tmp_path: Path) -> None:
    run = make(tmp_path, "back")
    run.verdict.unlink()
    run.events.unlink()
    run.record("first_step", step=1, steps=20)
    run.record("failed", step=17)
    run.record("resumed", step=10)
    run.record("first_step", step=11, steps=20)
    AttemptEvent(0, "1-a", "started", 1000.0, hosts=["a"], ranks=1).append(run.path)
    (told,) = story.tell([run])
    assert [mark for mark in told.marks if mark.kind in ("done again", "restart")] == [
        story.Mark(17, "done again", "steps 11 to 17 were done again", 10)
    ]
    text = report(run)
    assert '[17,"steps 11 to 17 were done again"]' in text and "resumed at step" not in text
    assert any("back from step 17 to 10: 7 steps lost" in line for line in watch.lines(run, 80))


def test_each_row_marks_its_own_best_run(tmp_path: Path) -> None:
    make(tmp_path, "good", loss=0.3)
    fast = make(tmp_path, "fast", loss=0.5)
    LoggedStep(21, 0.6, 900.0, 1021.0).append(fast.path)
    cells = compare.best_cells(story.tell([RunDir(tmp_path, name) for name in ("good", "fast")]))
    assert cells == {
        "training loss": {"good"},
        "validation loss": {"good"},
        "throughput, samples/s": {"fast"},
    }
    text = command.build(["good", "fast"], str(tmp_path))[0]
    assert re.findall(r'<td class="best">(.*?)</td>', text) == ["0.35", "900", "0.3"]


def test_charts_fill_their_rows_and_share_their_steps(tmp_path: Path) -> None:
    run = make(tmp_path, "seen")
    text = report(run)
    assert "Validation accuracy, %" not in text  # one point is no curve
    Validation(21, 0.4, 1021.0, 0.95).append(run.path)
    add_phases(run, 120, 4)
    text = report(run)
    assert "Validation accuracy, %" in text and "95 at step 21" in text
    classes = re.findall(r'<figure class="(\w*)">', text)
    # A wide one, four narrow ones as two rows of two; a wide one and a row of three.
    assert classes == ["wide", *["half"] * 4, "wide", "", "", ""]
    ends = {
        box.split()[5] for box in re.findall(r'data-box="(.*?)"', text.split("Where the time")[0])
    }
    assert ends == {"21"}


def test_scales_and_words_of_charts(tmp_path: Path) -> None:
    assert charts._heights(["0.001", "0.01", "0.1"]) == pytest.approx([0, 0.5, 1])
    assert len(compare._distinct(["datasets", "/shared/datasets"])) == 1
    assert len(compare._distinct(["sets", "/shared/datasets"])) == 2
    assert [fixed(value) for value in (2e-05, 0.25, 0.0)] == ["2e-05", "0.2500", "0.0000"]
    assert [duration(value) for value in (201, 7200, 198_000, math.inf)] == [
        "3 min 21 s",
        "2 h",
        "2 days 7 h",
        "unknown",
    ]
    run = make(tmp_path, "cpu")
    phases = {name: [0.1, 0.1] for name in Phases.PHASES}
    Phases(1, 1, 0.0, 0.6, phases, [1e9, 2e9], None, [1e9, 2.01e9]).append(run.path)
    found = curves.timing(run)
    assert found is not None and [*found.memory] == ["peak in use"]  # not the same bar twice


def test_each_value_has_its_origin(tmp_path: Path) -> None:
    run = make(tmp_path, "given", lr="0.1")
    (told,) = story.tell([run])
    assert told.settings["seed"] == ("0", "default")
    assert told.settings["optim.lr"] == ("0.1", "recipe or command line")
    assert told.settings["optim.args.eps"] == ("1e-08", "default")  # of torch's AdamW
    words = ["python", "-m", "rollcall", "supervise", "--", "-m", "rollcall.train", "digits"]
    JobRecord(str(run.path), 1, more={"command": [*words, "optim.lr=0.1"]}).write(run.path)
    (told,) = story.tell([run])
    assert told.settings["optim.lr"] == ("0.1", "command line")
    assert told.settings["optim.args.eps"] == ("1e-08", "default")


@pytest.mark.parametrize("first", [21, 1])
def test_losses_that_are_not_finite_are_not_hidden(tmp_path: Path, first: int) -> None:
    run = make(tmp_path, "diverged")
    for step in range(first, 31):
        LoggedStep(step, math.nan, 100.0, 2000.0 + step, more={"grad_norm": math.inf}).append(
            run.path
        )
    Validation(30, math.inf, 2030.0, 0.9).append(run.path)
    text = report(run)
    assert "Step 30; validation accuracy 90.00%, validation loss inf." in text
    assert ("nan at step 30; lowest 0.55" in text) is (first == 21)
    assert "no lines of steps" not in text


def test_compare_prints_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, "one", loss=0.5, lr="0.1")
    make(tmp_path, "two", loss=0.3, lr="0.2")
    root = ["--root", str(tmp_path)]
    assert cli.main(["compare", "one", "two", *root]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"optim.lr +0.1 +0.2\n", shown)
    assert re.search(r"validation loss +0.5 +0.3\n", shown)
    assert "seed" not in shown and "run.name" not in shown
    assert "best validation accuracy: one" in shown
    run = RunDir(tmp_path, "one")
    Validation(30, math.nan, 2000.0, math.nan).append(run.path)
    assert cli.main(["compare", "one", "two", *root]) == 0
    shown = capsys.readouterr().out
    assert "best validation accuracy: two" in shown
    assert re.search(r"validation loss +nan +0.3\n", shown)
    assert cli.main(["compare", "one", *root]) == 2
    assert "name at least two" in capsys.readouterr().err


def sweep(root: Path, rates: tuple[str, ...] = ("0.1", "0.2")) -> None:
    """A sweep of a cell for each learning rate."""
    parent = RunDir(root, "grid")
    parent.create()
    parent.job.mkdir()
    for rate in rates:
        make(parent.path, f"lr-{rate}", loss=float(rate[:5]), lr="1")
    cells = [Cell(f"lr-{rate}", [f"optim.lr={rate}"]).as_dict() for rate in rates]
    (parent.job / "cells-1-0.json").write_text(json.dumps([*cells, "damaged"]))


def test_a_sweep_is_one_report_and_a_group_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(tmp_path)
    make(tmp_path, "alone")
    root = ["--root", str(tmp_path)]
    assert cli.main(["report", "grid", *root, "-o", str(tmp_path / "grid.html")]) == 0
    text = (tmp_path / "grid.html").read_text()
    assert "report of 2 runs" in capsys.readouterr().out
    assert "Parameters and results" in text and "Best validation accuracy: lr-0.1" in text
    assert cli.main(["status", *root]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["run", "alone", "grid", "grid/lr-0.1", "grid/lr-0.2"]
    assert cli.main(["status", "grid", *root]) == 0
    shown = capsys.readouterr().out
    assert "2 runs: 2 done" in shown and shown.count("90.00%") == 2
    assert [cli.main([word, "grid", *root]) for word in ("goodput", "profile", "why")] == [2] * 3
    assert capsys.readouterr().err.count("grid is a sweep: name one of its runs") == 3


def test_a_cell_beside_another_run_is_compared_in_all_keys(tmp_path: Path) -> None:
    sweep(tmp_path)
    make(tmp_path, "alone", lr="1")
    stories = story.tell(
        [RunDir(tmp_path, "alone"), *(RunDir(tmp_path / "grid", f"lr-0.{n}") for n in (1, 2))]
    )
    assert not compare.differences(stories)["configuration"]  # its file says 1 in every run
    rows = compare.differences(stories[1:])["configuration"]
    assert rows == [["optim.lr", "0.1", "0.2"]]


def test_a_large_sweep_stays_small(tmp_path: Path) -> None:
    """The curves are of the best runs; what looks like a formula is text."""
    sweep(tmp_path, ("0.001$\\frac{$", *(f"0.{number}" for number in range(100, 200))))
    text, count = command.build(["grid"], str(tmp_path))
    assert count == 101 and len(text) < 1.5e6
    assert "$\\frac{$" in text and "The curves are of the first 24 runs" in text


def test_a_script_of_the_user_cannot_be_profiled(tmp_path: Path) -> None:
    make(tmp_path, "script").verdict.unlink()
    with pytest.raises(RefusedError, match="no rollcall training started in it"):
        profile.main(["--root", str(tmp_path), "script"])


def test_watch_shows_one_run(tmp_path: Path) -> None:
    run = make(tmp_path, "seen")
    shown = "\n".join(watch.lines(run, 80))
    assert "seen, done" in shown and "validation  loss 0.5, accuracy 0.9" in shown
    assert re.search(r"loss +0.55 +█.*▁\n", shown)
    for width in (1, 22, 40, 80):
        narrow = watch.lines(run, width)
        assert all(len(line) <= max(width, 32) for line in narrow)
    assert "seen,done" in re.sub(r"\s", "", "".join(watch.lines(run, 40)))  # wherever it wraps
    assert watch.sparkline([1.0, float("nan"), 3.0]) == "▁ █"
    assert watch.sparkline([2.0]) == "▁" and watch.sparkline([]) == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--root=none"], "/none is not a folder; expected the one with the runs"),
        (["nobody"], "there is no run 'nobody'"),
        (["kept", "-o", "{}"], "is a directory"),
        (["kept", "-o", "{}/none/report.html"], "cannot write"),
    ],
)
def test_wrong_requests_get_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    make(tmp_path, "kept")
    filled = [word.format(tmp_path) for word in words]
    assert cli.main(["report", "--root", str(tmp_path), *filled]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1


def test_without_matplotlib_the_line_to_install_it(tmp_path: Path) -> None:
    make(tmp_path, "kept")
    script = "import sys; sys.modules['matplotlib'] = None; from rollcall.cli import program; "
    script += f"sys.exit(program.main(['report', 'kept', '--root', {str(tmp_path)!r}]))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install matplotlib jinja2" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    make(tmp_path, "a run")
    sweep(tmp_path)
    with Server(0, str(tmp_path)) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def get(server: Server, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=500)
    headers = {} if host is None else {"Host": host}
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_dashboard_shows_runs_to_who_has_the_token(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    place = f"/{server.token}/"
    code, text = get(server, place)
    assert code == 200 and 'href="a%20run"' in text and 'href="grid/lr-0.1"' in text
    assert "lost" not in text  # a sweep has no state of its own
    assert text.index('href="grid"') < text.index('href="grid/lr-0.1"') and "90.00%" in text
    assert [get(server, place + name)[0] for name in ("a%20run", "grid/lr-0.1")] == [200, 200]
    with pytest.raises(RefusedError, match="choose another with --port"):
        dashboard.main(["--port", str(server.server_address[1])])
    own = f"localhost:{server.server_address[1]}"
    assert get(server, place, own)[0] == 200
    wrong: list[tuple[str, str | None]] = [
        ("/", None),
        (place[:-1], None),
        ("/x/", None),
        (f"/{server.token[:-1]}/", None),
        ("//", None),
    ]
    wrong += [(place, "evil.example"), (f"{place}a%20run", f"evil.example:{own[10:]}")]
    assert [get(server, *each)[0] for each in wrong] == [403] * len(wrong)
    outside = (
        "none",
        "../a%20run",
        "..%2f..%2fetc/passwd",
        "a%20run/metrics.jsonl",
        "%ff",
        "x" * 999,
    )
    assert [get(server, place + path)[0] for path in outside] == [404] * len(outside)


def test_the_dashboard_makes_a_report_again_when_the_run_has_changed(server: Server) -> None:
    run = server.runs()["a run"]
    first = server.page("a run")
    assert server.page("a run") is first
    LoggedStep(21, 0.123, 100.0, 1021.0).append(run.path)
    os.utime(run.metrics, (2e9, 2e9))
    assert "0.123" in server.page("a run")
    server.page("grid")
    cell = server.runs()["grid/lr-0.1"]
    LoggedStep(21, 0.123, 100.0, 1021.0).append(cell.path)
    os.utime(cell.metrics, (2e9, 2e9))
    assert "0.123" in server.page("grid")


def test_the_list_of_runs_takes_any_name(server: Server) -> None:
    make(Path(server.root), os.fsdecode(b"odd\xff"))
    place = f"/{server.token}/"
    code, text = get(server, place)
    assert code == 200 and 'href="odd%FF"' in text
    assert get(server, f"{place}odd%FF")[0] == 200
