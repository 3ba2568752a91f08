"""`rollcall report --figure`: charts for papers, of run directories written here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollcall.cli import program as cli
from rollcall.records.run import LoggedStep
from rollcall.records.run_dir import RunDir
from rollcall.tools.report import charts, command, compare, figures, page, story

RATES, SEEDS = ("0.1", "0.2"), (0, 1, 2)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Six runs: two learning rates with three seeds each, a step every two seconds."""
    names = []
    for rate in RATES:
        for seed in SEEDS:
            run = RunDir(tmp_path, f"lr-{rate}-seed-{seed}")
            run.create()
            run.job.mkdir()
            text = f"optim: {{lr: {rate}}}\ndata: {{global_batch: 64}}\nseed: {seed}\n"
            run.config.write_text(text)
            for step in range(1, 51):
                loss = float(rate) * 10 + seed - 0.01 * step
                more = {"lr": 0.1, "grad_norm": -1.0}
                LoggedStep(step, loss, 1.0, 1000.0 + 2 * step, more=more).append(run.path)
            names.append(run.name)
    return names


def drawn(
    monkeypatch: pytest.MonkeyPatch, root: Path, words: list[str]
) -> tuple[list[figures.Line], Path]:
    """Draw a figure with the command; return its curves too."""
    made: list[figures.Line] = []
    whole = figures._lines

    def noted(*given: object) -> list[figures.Line]:
        made.extend(lines := whole(*given))  # type: ignore[arg-type]
        return lines

    monkeypatch.setattr(figures, "_lines", noted)
    path = root / "loss.svg"
    assert cli.main(["report", "--root", str(root), "--figure", str(path), *words]) == 0
    return made, path


def test_seeds_become_a_mean_with_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]
) -> None:
    lines, path = drawn(monkeypatch, tmp_path, [*runs, "--over", "seed", "--log"])
    assert [line.name for line in lines] == [
        f"optim.lr={rate} (mean ± s.d. of 3)" for rate in RATES
    ]
    for rate, line in zip(RATES, lines, strict=True):
        assert line.y[-1] == pytest.approx(float(rate) * 10 + 1 - 0.5)
        assert line.spread[-1] == pytest.approx(1.0)  # of 0, 1 and 2
    assert "Training loss of lr-0.1-seed-0" in path.read_text()


def test_a_report_has_the_mean_over_the_seeds(tmp_path: Path, runs: list[str]) -> None:
    told = story.tell([RunDir(tmp_path, name) for name in runs])
    assert compare.over_seeds(told) == [
        ["optim.lr", "runs", "Training loss"],
        ["0.1", "3", "1.5 ± 1"],
        ["0.2", "3", "2.5 ± 1"],
    ]
    assert compare.over_seeds(told[:1]) == compare.over_seeds([told[0], told[3]]) == []
    (of_means, *_), (each, *_) = page._curves(told), page._curves([told[0], told[3]])
    assert "one standard deviation over the seeds" in of_means.text
    low, high = of_means.data["series"]
    assert (low["n"], high["n"]) == ("optim.lr=0.1", "optim.lr=0.2")
    assert [low[key][-1] for key in ("y", "low", "high")] == pytest.approx([1.5, 0.5, 2.5])
    assert [series["n"] for series in each.data["series"]] == [runs[0], runs[3]]
    assert "<td>2.5 ± 1</td>" in command.build(runs, str(tmp_path))[0]


def test_time_samples_and_smoothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]
) -> None:
    (line,), _ = drawn(monkeypatch, tmp_path, [runs[0], "--x", "samples", "--smooth", "0.5"])
    assert (line.x[0], line.x[-1]) == (64, 50 * 64)
    # The first value counts a third, the second one two thirds.
    assert line.y[:2].tolist() == pytest.approx([line.raw[0], (line.raw[0] + 2 * line.raw[1]) / 3])
    (line,), _ = drawn(monkeypatch, tmp_path, [runs[0], "--x", "time"])
    assert line.x[-1] - line.x[0] == 98
    assert np.array_equal(line.y, line.raw)


@pytest.mark.parametrize(
    ("ending", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")]
)
def test_equal_runs_make_equal_files(
    tmp_path: Path, runs: list[str], ending: str, start: bytes
) -> None:
    paths = [tmp_path / f"{name}.{ending}" for name in "ab"]
    for path in paths:
        words = ["report", runs[0], "--root", str(tmp_path), "--figure", str(path)]
        assert cli.main([*words, "--curve", "loss,lr"]) == 0
    first, second = (path.read_bytes() for path in paths)
    assert first.startswith(start) and first == second


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--figure", "loss.jpg"], "expected a name that ends in .svg, .pdf or .png"),
        (["--figure", "a.svg", "--curve", "los"], "did you mean 'loss'?"),
        (
            ["--figure", "a.svg", "--over", "sed"],
            "the runs do not differ in it, did you mean 'seed'",
        ),
        (["--figure", "a.svg", "--smooth", "10"], "expected 0 to less than 1, such as 0.9"),
        (["--figure", "a.svg", "--curve", "grad_norm", "--log"], "has no value above 0"),
        (["--figure", "none/a.svg"], "cannot write none/a.svg"),
    ],
)
def test_a_wrong_request_says_what_was_expected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runs: list[str],
    words: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *runs, "--root", str(tmp_path), *words]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1


def test_a_script_without_a_configuration_has_no_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runs: list[str]
) -> None:
    (tmp_path / runs[0] / "config.yaml").unlink()
    words = ["--figure", str(tmp_path / "a.svg"), "--x", "samples"]
    assert cli.main(["report", runs[0], "--root", str(tmp_path), *words]) == 2
    assert "has no data.global_batch; use step" in capsys.readouterr().err
    assert story.tell([RunDir(tmp_path, runs[0])])[0].settings == {}


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([2.0, 2.25, 2.5], ["2.00", "2.25", "2.50"]),
        ([0.0, 5e3, 1e4], ["0k", "5k", "10k"]),
        ([0.0, 1e-5, 2e-5], ["0", "1e-5", "2e-5"]),
        ([0.0, 200.0], ["0", "200"]),
    ],
)
def test_the_numbers_at_an_axis_have_equal_decimals(values: list[float], texts: list[str]) -> None:
    assert charts._Ticks().format_ticks(values) == texts
