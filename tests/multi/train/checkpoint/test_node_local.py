"""Node-local checkpoints: two nodes of one rank, each with its own directory."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checkpoint_differences import differences
from disks import frozen, mounted, needs_root, until
from ranks import Ranks, together

from rollcall.config import ConfigError
from rollcall.records.run_dir import RunDir
from rollcall.system.files import read_lines
from rollcall.train.checkpoint import layout
from rollcall.train.checkpoint.node_local import directory_of, open_store
from rollcall.train.checkpoint.tools import verify
from rollcall.train.ranks.world import World

WORDS = ["digits", "model.name=mlp", "optim.schedule=constant", "log.every=1", "device=cpu"]
WORDS += ["train.evaluate_every=null"]
EVERY = 5


def start(root: Path, steps: int, *words: str, ranks: int = 2, per_node: int = 1) -> Ranks:
    words = (f"run.root={root}", "run.name=first", f"train.steps={steps}", *words)
    words = (*WORDS, f"checkpoint.every={EVERY}", "parallel.strategy=zero3", *words)
    disk = f"checkpoint.local={root}/disk-$GROUP_RANK"
    return Ranks(ranks, [disk, *words], root / "logs", node_size=per_node)


def finish(root: Path, steps: int, *words: str, ranks: int = 2, per_node: int = 1) -> str:
    (root / "logs" / "rank-0.log").unlink(missing_ok=True)
    started = start(root, steps, *words, ranks=ranks, per_node=per_node)
    codes = started.wait()
    assert codes == [0] * ranks, started.output()
    verdict = RunDir(root, "first").read_verdict()
    assert verdict is not None and (verdict.state, verdict.step) == ("done", steps)
    return started.output()


def events(root: Path, name: str) -> list[dict[str, Any]]:
    lines = read_lines(RunDir(root, "first").events)
    return [line for line in lines if line["event"] == name]


def saved(root: Path, local: bool) -> list[int]:
    return [line["step"] for line in events(root, "checkpointed") if line.get("local") or not local]


def on_disk(root: Path, node: int) -> Path:
    [directory] = (root / f"disk-{node}").iterdir()
    return directory


class Killed(NamedTuple):
    """A run whose ranks were killed in the middle of a copy, as a copy to play with.

    Attributes:
        shared: the newest step on shared storage.
        local: the newest step on the nodes' disks.
    """

    root: Path
    shared: int
    local: int


def stopped_between_saves(root: Path, ranks: Ranks) -> bool:
    """Stop all ranks; continue them unless both nodes have published the same steps."""
    for process in ranks.processes:
        os.kill(process.pid or 0, signal.SIGSTOP)
    first, second = (set(layout.published(on_disk(root, node))) for node in range(2))
    if first != second:
        for process in ranks.processes:
            os.kill(process.pid or 0, signal.SIGCONT)
    return first == second


@pytest.fixture(scope="module")
def remains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Shared storage hangs after the first checkpoint, while training continues."""
    root = tmp_path_factory.mktemp("killed") / "run"
    checkpoints = RunDir(root, "first").checkpoints
    with mounted(checkpoints, "ext4", "16M"):
        ranks = start(root, 10**6)
        try:
            until(lambda: bool(layout.published(checkpoints)))
            with frozen(checkpoints):
                count = len(events(root, "checkpointed"))
                until(lambda: len(events(root, "checkpointed")) > count + 4)
                until(partial(stopped_between_saves, root, ranks))
                for process in ranks.processes:
                    process.kill()
        finally:
            ranks.kill()
        ignored = shutil.ignore_patterns("*.image", "lost+found")
        kept = shutil.copytree(root, root.with_name("remains"), ignore=ignored)
    shutil.rmtree(root)
    yield kept


@pytest.fixture
def killed(remains: Path) -> Iterator[Killed]:
    # In the same place: the name of a node's directory depends on the run's path.
    root = Path(shutil.copytree(remains, remains.with_name("run")))
    shared = max(layout.published(RunDir(root, "first").checkpoints))
    newest = [max(layout.published(on_disk(root, node))) for node in range(2)]
    yield Killed(root, shared, min(newest))
    shutil.rmtree(root)


@needs_root
def test_goes_on_from_the_nodes_disks_as_if_nothing_had_been(killed: Killed) -> None:
    root, steps = killed.root, killed.local + 3
    assert killed.local > killed.shared
    run_dir = RunDir(root, "first")
    finish(root, steps)
    assert events(root, "resumed")[-1]["step"] == killed.local
    last = layout.path_of(run_dir.checkpoints, steps)
    assert not verify.problems(last)
    assert all(path.name.startswith("step-") for path in run_dir.checkpoints.iterdir())
    assert not any(any((root / f"disk-{node}").iterdir()) for node in range(2))
    finish(root, steps, "run.name=undisturbed", "checkpoint.local=null")
    assert not differences(last, layout.path_of(RunDir(root, "undisturbed").checkpoints, steps))


LENT = {  # ranks, ranks of a node, the lost node
    "ddp": (2, 1, 0, ["parallel.strategy=ddp"]),
    "hsdp": (4, 1, 3, ["parallel.strategy=hsdp"]),
    "mirror": (4, 2, 1, ["checkpoint.mirror=true"]),
}


@pytest.mark.parametrize(
    "name", ["ddp", *(pytest.param(name, marks=pytest.mark.long) for name in ("hsdp", "mirror"))]
)
def test_a_lost_node_gets_its_part_from_another_one(tmp_path: Path, name: str) -> None:
    ranks, per_node, lost, words = LENT[name]
    training = start(tmp_path, 10**6, *words, ranks=ranks, per_node=per_node)
    until(lambda: len(saved(tmp_path, local=True)) > 2)
    training.kill()
    run_dir = RunDir(tmp_path, "first")
    shutil.rmtree(run_dir.checkpoints)
    kept = [on_disk(tmp_path, node) for node in range(ranks // per_node) if node != lost]
    newest = max(max(layout.published(directory)) for directory in kept)
    if name == "mirror":  # which follows a save a little later
        newest = max(max(layout.published(directory / "mirrored")) for directory in kept)
    shutil.rmtree(tmp_path / f"disk-{lost}")
    end = newest + EVERY + 1
    output = finish(tmp_path, end, *words, ranks=ranks, per_node=per_node)
    resumed = events(tmp_path, "resumed")[-1]["step"]
    assert newest - EVERY * (name == "mirror") <= resumed <= newest
    assert (
        f"the checkpoint of step {resumed}: the node of rank {lost * per_node} got it from"
        in output
    )
    assert name == "mirror" or not events(tmp_path, "refused")
    undisturbed = "run.name=undisturbed", "checkpoint.local=null", "checkpoint.mirror=false"
    finish(tmp_path, end, *words, *undisturbed, ranks=ranks)
    last = [
        layout.path_of(RunDir(tmp_path, run).checkpoints, end) for run in ("first", "undisturbed")
    ]
    assert not differences(*last)


def damage(killed: Killed) -> None:
    file = layout.path_of(on_disk(killed.root, 1), killed.local) / "rank-00001.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def lose(killed: Killed) -> None:
    shutil.rmtree(killed.root / "disk-0")


@needs_root
@pytest.mark.parametrize(
    ("what", "ranks", "reason"),
    [
        (damage, 2, "rank-00001.bin is not what was written"),
        (lose, 2, "manifest.json is missing"),
        (None, 1, "that this rank needs is missing"),  # the other half is on the other node
    ],
    ids=["damaged", "lost", "one rank"],
)
def test_what_a_node_lacks_is_told_and_an_older_one_is_used(
    killed: Killed, what: Callable[[Killed], None] | None, ranks: int, reason: str
) -> None:
    if what:
        what(killed)
    output = finish(killed.root, killed.local + 1, ranks=ranks)
    resumed = events(killed.root, "resumed")[-1]["step"]
    assert resumed == (killed.local - EVERY if what is damage else killed.shared)
    refused = [line for line in events(killed.root, "refused") if line["step"] == killed.local]
    assert len(refused) == 1 and refused[0]["local"] and reason in refused[0]["reason"]
    assert f"the local checkpoint of step {killed.local} cannot be used: on " in output
    assert not layout.refused(RunDir(killed.root, "first").checkpoints)


@needs_root
def test_with_nothing_whole_the_run_begins_afresh_on_all_ranks(killed: Killed) -> None:
    """The state of the other node, which has read its part by then, stays unchanged."""
    checkpoints = RunDir(killed.root, "first").checkpoints
    shutil.rmtree(checkpoints)
    for node in range(2):
        for step, path in layout.published(on_disk(killed.root, node)).items():
            if step != killed.local:
                shutil.rmtree(path)
    damage(killed)
    finish(killed.root, 3)
    assert not events(killed.root, "resumed")
    finish(killed.root, 3, "run.name=undisturbed", "checkpoint.local=null")
    undisturbed = RunDir(killed.root, "undisturbed").checkpoints
    assert not differences(layout.path_of(checkpoints, 3), layout.path_of(undisturbed, 3))


@needs_root
def test_a_full_local_disk_is_left(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk-1", "tmpfs", "32k"):
        output = finish(tmp_path, 12)
    [failure] = events(tmp_path, "save_failed")
    assert failure["local"] and "No space left on device" in failure["reason"]
    first, *others = saved(tmp_path, local=False)
    # At once, or when the next save is due and waits for the one that fails.
    assert EVERY < first <= 10 and others == [step for step in (10, 12) if step > first]
    assert not saved(tmp_path, local=True)
    assert "local checkpoints" in output and "not used: [Errno 28]" in output


def test_asked_to_stop_the_state_is_on_shared_storage(tmp_path: Path) -> None:
    ranks = start(tmp_path, 10**6)
    until(lambda: len(saved(tmp_path, local=True)) > 2)
    ranks.processes[1].terminate()
    assert ranks.wait() == [75, 75]
    verdict = RunDir(tmp_path, "first").read_verdict()
    assert verdict is not None and verdict.state == "requeue"
    place = layout.path_of(RunDir(tmp_path, "first").checkpoints, verdict.step)
    assert not verify.problems(place)


def test_one_directory_for_several_hosts_is_refused(tmp_path: Path) -> None:
    together(2, _open, tmp_path)


def _open(rank: int, root: Path) -> None:
    world = World.join("cpu")
    world.host = f"host-{rank}"  # else they are one node: they do share a directory
    run_dir = RunDir(root, "run")
    if rank == 0:
        run_dir.create()
    world.barrier()
    with pytest.raises(ConfigError, match="is one directory for several hosts"):
        open_store(str(root / "disk"), run_dir, world)
    assert not list((root / "disk").rglob(f".probe-*-{rank}"))
    # Probes that killed attempts left on a separate disk do not count.
    own = str(root / f"disk-{rank}")
    left = directory_of(own, run_dir) / ".probe-0123abcd-0"
    if rank == 1:
        left.parent.mkdir(parents=True, mode=0o700)
        for name in (left.name, ".probe-0"):
            left.with_name(name).touch()
    opened = open_store(own, run_dir, world)
    assert opened.newest() is None and not list(opened.directory.glob(".probe*"))
    world.leave()
