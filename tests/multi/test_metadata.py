"""How much a run loads a shared file system, counted by strace."""

import shutil

import operations
import pytest


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_nodes_leave_a_shared_file_system_alone() -> None:
    seconds = 4.0
    for phase, found in operations.observe(seconds, ranks=2).items():
        shown = sorted(f"{each.call} {each.path}" for each in found)
        assert 0 < len(found) / seconds <= operations.GOALS[phase], (phase, shown)
