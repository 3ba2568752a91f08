"""Which node gets a checkpoint from which other one."""

from __future__ import annotations

import pytest

from rollcall.train.checkpoint.lending import loans

# Own save and tensors, mirrored save and tensors, needed tensors.
A, B, C = 11, 22, 33
NONE = 0, 0


@pytest.mark.parametrize(
    ("rows", "publishers", "expected"),
    [
        pytest.param([(7, A, *NONE, A), (*NONE, *NONE, A)], [0, 1], [(0, False, 1)], id="replica"),
        pytest.param(
            [(*NONE, *NONE, A), (7, B, 7, A, B)], [0, 1], [(1, True, 0)], id="mirrored copy"
        ),
        pytest.param([(7, A, *NONE, A), (*NONE, *NONE, B)], [0, 1], [], id="nobody has it"),
        pytest.param([(*NONE, *NONE, A), (*NONE, *NONE, B)], [0, 1], [], id="no save"),
        pytest.param(
            [(7, A, 7, B, A), (6, B, *NONE, B)], [0, 1], [(0, True, 1)], id="of another save"
        ),
        pytest.param(
            [(7, B, 7, A, B), (*NONE, 7, C, C)], [0, 1], [(1, True, 1)], id="its own mirrored copy"
        ),
        pytest.param(
            [(7, A, *NONE, A), (7, A, *NONE, A), (*NONE, *NONE, A), (*NONE, *NONE, A)],
            [0, 2],
            [(0, False, 2)],
            id="two ranks on a node",
        ),
        pytest.param(
            [(7, A, 7, C, A), (7, B, 7, A, B), (*NONE, *NONE, C), (*NONE, *NONE, B)],
            [0, 1, 2, 3],
            [(0, True, 2), (1, False, 3)],
            id="two lost nodes",
        ),
    ],
)
def test_a_node_gets_what_it_needs(
    rows: list[tuple[int, ...]], publishers: list[int], expected: list[tuple[int, bool, int]]
) -> None:
    assert loans(rows, publishers) == expected
