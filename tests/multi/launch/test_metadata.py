"""How much runs load a shared file system, and what many of them cost: shares of campaigns."""

import shutil

import growth
import operations
import pytest


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_nodes_leave_a_shared_file_system_alone() -> None:
    seconds = 4.0
    for phase, found in operations.observe(seconds, ranks=2).items():
        shown = sorted(f"{each.call} {each.path}" for each in found)
        assert 0 < len(found) / seconds <= operations.GOALS[phase], (phase, shown)


@pytest.mark.long
def test_many_runs_and_ranks_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    growth.main(["--most=10", "--repeats=1"])  # whose code tells of times
    shown = capsys.readouterr().out
    assert "status of local runs, N = 10" in shown and "an exchange, N = 16,384" in shown
