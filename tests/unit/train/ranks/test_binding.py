"""A rank runs on the cores near its GPU, as a tree like /sys lists them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rollcall.train.ranks.device import bind_near


@pytest.mark.parametrize(
    ("listed", "allowed", "chosen"),
    [
        ("0-3,8-11\n", range(16), {0, 1, 2, 3, 8, 9, 10, 11}),
        ("4\n", range(16), {4}),
        ("0-3\n", (2, 3, 4, 5), {2, 3}),  # the job has only some of them
        ("0-3\n", (8, 9), None),  # or others, which stay
        ("\n", range(4), None),
        (None, range(4), None),
    ],
)
def test_cores_near_a_gpu(
    listed: str | None,
    allowed: range | tuple[int, ...],
    chosen: set[int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0)
    asked, folder = list[object](), tmp_path / "bus" / "pci" / "devices" / "0001:c1:00.0"
    if listed is not None:
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(listed)

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return gpu

    bound = list[set[int]]()
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*allowed})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    device = torch.device("cuda", 5)
    bind_near(device, tmp_path)
    assert asked == [device]
    assert bound == ([chosen] if chosen else [])
