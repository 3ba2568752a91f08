"""How the exception of a rank is shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollcall.train.data.loader import Loader
from rollcall.train.ranks import failure

USERS = """
from torch import nn

class Net(nn.Module):
    def forward(self, x):
        return self.part(x)

    def part(self, x):
        if x == "loader":
            return Loader([1, 2], 2, num_worker=1)
        raise ValueError("a label is 7")
"""


@pytest.mark.parametrize("inside", ["own", "loader"])
def test_frames_above_the_users_code_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    file = tmp_path / "mine.py"
    names: dict[str, object] = {"Loader": Loader}
    exec(compile(USERS, str(file), "exec"), names)
    with pytest.raises(
        (TypeError, ValueError), match=r"a label is 7|unexpected keyword .*'num_worker'"
    ) as caught:
        names["Net"]()(inside)  # type: ignore[operator]
    failure.show(caught.type, caught.value, caught.tb.tb_next)
    shown = capsys.readouterr().err
    assert shown.startswith(f'Traceback (most recent call last):\n  File "{file}"')
    assert "in forward" in shown and "in part" in shown
    assert "torch/nn" not in shown


def test_without_a_users_frame_everything_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        failure.describe.missing  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        failure.show(type(error), error, error.__traceback__)
    assert "missing" in capsys.readouterr().err and sys.excepthook is not failure.show
