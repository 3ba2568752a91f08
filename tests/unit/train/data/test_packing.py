"""Rows packed into one sequence have the losses and gradients of each row alone."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from user_tasks import WORDS, Sentences

from rollcall.config.schema import ConfigError, Model
from rollcall.train.data import stream
from rollcall.train.data.form import Form
from rollcall.train.data.packing import Packed, fitted
from rollcall.train.models.gpt import gpt
from rollcall.train.numerics import losses

LENGTH = 24
TOLERANCE = 1e-6  # relative, fp32: other kernels of attention, and sums in another order


class Heads(TorchFunctionMode):
    """Notes how many heads of queries, keys and values attention is given."""

    seen: set[tuple[int, ...]]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            self.seen = getattr(self, "seen", set()) | {tuple(one.shape[1] for one in args[:3])}
        return func(*args, **(kwargs or {}))


def test_losses_and_gradients_equal_those_of_each_row_alone() -> None:
    torch.manual_seed(0)
    source: Any = SimpleNamespace(shape=(LENGTH,), classes=WORDS)
    model = gpt(Model(hidden_size=16, num_layers=2), source)
    rows = Sentences(20)
    form = Form(pad=LENGTH, packs=True, mask=None, shifts=True)
    packed = Packed(rows, form, "sentences")
    loss = losses.build("next_token", by_target=True)

    def sums(inputs: Any, targets: Any) -> torch.Tensor:
        found, weights = loss(model(**inputs), targets)
        found.sum().backward()  # type: ignore[no-untyped-call]
        return torch.stack([found.sum(), weights.sum()]).detach()

    with Heads() as heads:
        one = sums(*form.inputs_and_targets([packed[n] for n in range(len(packed))]))
    assert heads.seen == {(4, 4, 4)}  # one key and value for each query, although two share one
    gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    alone = [sums(*Form().inputs_and_targets([rows[row]])) for row in range(20)]
    assert torch.stack(alone).sum(0).tolist() == pytest.approx(one.tolist(), rel=TOLERANCE)
    for weight, before in zip(model.parameters(), gradients, strict=True):
        assert weight.grad is not None
        assert (weight.grad - before).norm() <= TOLERANCE * before.norm() * 10
    assert len(packed) < 10


def test_every_row_is_in_one_group_that_fits() -> None:
    lengths = [1 + number * 7 % 23 for number in range(500)]
    groups = fitted(lengths, 24)
    assert sorted(row for group in groups for row in group) == [*range(500)]
    assert max(sum(lengths[row] for row in group) for group in groups) == 24
    assert len(groups) <= -(-sum(lengths) // 24) + 2


def test_rows_that_cannot_be_packed_are_named() -> None:
    def refused(rows: Any) -> str:
        with pytest.raises(ConfigError) as found:
            Packed(rows, Form(pad=3, packs=True, mask=None), "rows")
        return str(found.value)

    class Known(list[Any]):
        lengths = (1, 2, 3)

    class Unreadable(list[Any]):
        def __getitem__(self, _: Any) -> Any:
            raise OSError("no disk")

    assert "rows: row 1 cannot be packed: it has 4 entries, more than data.pack=3" in refused(
        [{"x": []}, {"x": [0] * 4}]
    )
    assert "rows: row 0 cannot be packed: OSError: no disk" in refused(Unreadable([1]))
    assert "rows has 2 rows, but 3 `lengths`" in refused(Known([1, 2]))


def test_a_row_of_no_tokens_leaves_the_others_as_they_are() -> None:
    form = Form(pad=4, packs=True, mask=None, shifts=True)
    rows = [{"input_ids": one, "labels": one} for one in ([], [5, 6], [7])]
    inputs, targets = form.inputs_and_targets([rows])
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 0]]
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 0]]
    assert targets.tolist() == [[-100, 6, -100, -100]]
    assert inputs["input_ids"].dtype == torch.int64


class Numbers:
    """A stream of rows of random lengths, which goes on where it was left if it has a state."""

    def __init__(self, has_state: bool) -> None:
        self.at = 0
        if has_state:
            self.state_dict = lambda: {"at": self.at}
            self.load_state_dict = lambda state: setattr(self, "at", state["at"])

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at = self.at if hasattr(self, "state_dict") else 0
        while self.at < 23:
            self.at += 1
            yield torch.full((int(torch.randint(1, 10, ())),), self.at)
        self.at = 0


@pytest.mark.parametrize("has_state", [True, False])
def test_a_packed_stream_has_each_row_once_and_resumes_anywhere(
    has_state: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "AHEAD", 7)

    def packed() -> Any:
        return stream.adapted(Numbers(has_state), "numbers", 0, Form(pad=16, packs=True))

    def rows(data: Any, positions: Iterable[int]) -> list[list[int]]:
        return [[int(row[0]) for row in data[position]] for position in positions]

    expected = rows(packed(), range(27))
    read = [*itertools.chain(*expected)]
    for epoch in (read[:23], read[23:46]):
        assert sorted(epoch) == [*range(1, 24)]
    for cut in range(1, 20):
        before, after = packed(), packed()
        rows(before, [0, *range(cut)])
        position = stream.StreamPosition(*json.loads(json.dumps(before.position())))
        assert (position.state is None) is not has_state
        after.continue_at(position)
        assert rows(after, [0, 1, *range(cut, 27)]) == [*expected[:2], *expected[cut:]]
