"""Models are built without memory, and start from what is stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rollcall.config import parse
from rollcall.train import models
from rollcall.train.numerics.randomness import set_seed
from rollcall.train.weights import stored
from rollcall.train.weights.deferred import SMALL, Draws, build, tensors_of
from rollcall.train.weights.start import Start, built, match, rename


class Odd(nn.Module):
    """Code such as users write: numbers that are read, NumPy, an attribute, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        rates = [one.item() for one in torch.linspace(0, 1, 5)]
        self.first = nn.Linear(100, 100, bias=rates[-1] == 1)
        self.second = nn.Linear(100, 100)
        self.second.weight = self.first.weight
        self.third = nn.Parameter(torch.from_numpy(np.random.rand(80, 80)).float())
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.second.bias, std=0.02)
        large = torch.arange(10_000).float()
        self.register_buffer("positions", large / large.max())
        self.table = torch.outer(large[:100], large[:100])
        self.own: Any = [SimpleNamespace(more={"table": self.table + 1}), nn.LSTM(50, 50)]
        self.fourth = nn.Parameter(torch.randn(100, 100) * float(large.mean()))
        self.fifth = nn.Linear(100, 100).bfloat16()
        self.fifth.weight.data = self.fifth.weight.data / self.fifth.weight.data.norm()


def images(name: str) -> Callable[[], nn.Module]:
    source: Any = SimpleNamespace(shape=(3, 32, 32), classes=10, form=None)
    return lambda: models.build(parse([f"model.name={name}"])[1].model, source)


@pytest.mark.parametrize("make", [Odd, images("swin_t"), images("resnet18")])
def test_each_tensor_has_the_values_of_a_model_in_memory(make: Callable[[], nn.Module]) -> None:
    np.random.seed(0)
    model, recorder, reason = build(make, 5)
    assert recorder is not None, reason
    begin = Start(model, recorder)
    assert {tensor.device.type for _, tensor in tensors_of(model)} == {"meta"}
    begin.fill(model, torch.device("cpu"), torch.device("cpu"))
    set_seed(5, "model")
    with Draws(5):
        whole = make()
    assert model.state_dict().keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    if isinstance(model, Odd) and isinstance(whole, Odd):
        assert model.first.weight is model.second.weight
        assert torch.equal(model.table, whole.table)
        assert torch.equal(model.own[0].more["table"], whole.table + 1)
        one = torch.ones(1, 50)
        assert torch.equal(model.own[1](one)[0], whole.own[1](one)[0])


@pytest.mark.parametrize("make", [Odd, images("resnet18")])
def test_what_a_checkpoint_will_fill_is_not_drawn(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, recorder, _ = build(make, 5)
    assert recorder is not None
    begin, before = Start(model, recorder), torch.get_rng_state()
    drawn, values = list[torch.Tensor](), recorder.values

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        drawn.append(tensor)
        return values(tensor)

    monkeypatch.setattr(recorder, "values", noted)
    begin.fill(model, torch.device("cpu"), torch.device("cpu"), draws=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert max(tensor.numel() for tensor in drawn if tensor.requires_grad) <= SMALL
    with Draws(5):
        whole = dict(make().named_parameters())
    for name, weight in model.named_parameters():
        if weight.numel() > SMALL:
            assert -0.02 <= weight.min() < 0 < weight.max() <= 0.02, name
        else:
            assert torch.equal(weight, whole[name]), name


def by_numpy(weight: torch.Tensor) -> None:
    weight.numpy()[0] = 1.0


def by_index(weight: torch.Tensor) -> None:
    weight[torch.zeros(100).long(), torch.arange(100)] = 1.0


@pytest.mark.parametrize(
    ("change", "word"),
    [(by_numpy, "numpy"), (by_index, "values of weight were not recorded")],
)
def test_a_model_whose_code_needs_values_is_built_whole(change: Any, word: str) -> None:
    def make() -> nn.Module:
        layer = nn.Linear(100, 100)
        change(layer.weight.data)
        return layer

    model, recorder, reason = build(make, 0)
    assert recorder is None and word in reason.lower()
    assert torch.equal(model.state_dict()["weight"][0], torch.ones(100))


def test_hooks_on_weights_are_kept() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        return layer

    model, recorder, reason = build(make, 0)
    assert recorder is None and "weight has a hook" in reason
    model(torch.ones(1, 4)).sum().backward()
    gradient = model.get_parameter("weight").grad
    assert gradient is not None and torch.equal(gradient, torch.full((4, 4), 2.0))


MISTAKES = [
    ("model.init_random=hed.*", "model.init_random: no tensor has a name like 'hed.*'; there are"),
    ("model.init_rename=a.*=b", "expected rules old=new with at most one * on each side"),
    ("model.init_rename=a.*=b.*", "model.init_rename: no tensor has a name like 'a.*'"),
    ("model.freeze=hed.*", "model.freeze: no tensor has a name like 'hed.*'"),
    ("model.freeze='*'", "freezes the whole model, so nothing can be trained"),
    ("model.hidden_size=8", r"1.weight ([16, 64] instead of [8, 64])"),
    ("model.init_random=4.*", "holds 2 of 2 tensors"),
    ("", "To start them from random numbers, set model.init_random=4.weight,4.bias"),
]


@pytest.mark.parametrize(("word", "message"), MISTAKES)
def test_a_mistake_gets_a_sentence(word: str, message: str) -> None:
    words = ["model.name=mlp", "model.hidden_size=16", "model.init=x"]
    config = parse([*words, *filter(None, [word])])[1]
    source: Any = SimpleNamespace(shape=(1, 8, 8), classes=10, form=None)
    shapes = {"1.weight": (16, 64), "1.bias": (16,), "head": (2, 2)}
    if word == "model.init_random=4.*":
        begin = built(config, lambda: models.build(config.model, source))
        assert match(begin.model, shapes, config) == {"1.weight": "1.weight", "1.bias": "1.bias"}
        return
    with pytest.raises(ValueError) as caught:
        match(built(config, lambda: models.build(config.model, source)).model, shapes, config)
    assert message in str(caught.value)


def test_rules_and_prefixes_rename_stored_tensors() -> None:
    assert rename(["net.a.w", "net.b.w", "c"], "net.a.*=x.*,net.*=*") == {
        "x.w": "net.a.w",
        "b.w": "net.b.w",
        "c": "c",
    }
    config = parse(["model.name=mlp", "model.init=x"])[1]
    model = nn.Sequential(nn.Linear(2, 2))
    shapes = {"module.0.weight": (2, 2), "module.0.bias": (2,)}
    assert match(model, shapes, config) == {
        "0.weight": "module.0.weight",
        "0.bias": "module.0.bias",
    }


def test_files_that_are_not_weights_get_a_sentence(tmp_path: Path) -> None:
    files = {"a.safetensors": b"x" * 100, "b.pt": b"x", "c.txt": b"", "d.pt": None}
    for name, content in files.items():
        if content is None:
            torch.save({"epoch": 3}, tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            stored.open_(str(tmp_path / name))
    (tmp_path / "shards").mkdir()
    index = {"weight_map": {"w": "model-1.safetensors"}}
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"shards: .*model-1\.safetensors"):
        stored.open_(str(tmp_path / "shards"))
    with pytest.raises(ValueError, match="no such file, folder or run"):
        stored.open_("nothing")
