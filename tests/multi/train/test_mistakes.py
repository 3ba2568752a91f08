"""Mistakes with one's own code: one sentence with the contract, the sample and the code."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import HELPERS
from ranks import FORKSERVER, TIMEOUT

from rollcall.system.hosts import free_port

GOOD = {
    "model.name": "user_mistakes:net",
    "data.name": "user_mistakes:pairs",
    "train.steps": "2",
    "data.global_batch": "4",
    "device": "cpu",
    "optim.warmup_steps": "0",
}
DATA = r"data\.name=user_mistakes:\w+"
TABLE: dict[str, tuple[list[str], str]] = {
    "sample is text": (
        ["data.name=user_mistakes:text"],
        r"sample 0 of the training data \(data\.name=user_mistakes:text\): its part 0 is a str; "
        "expected tensors, arrays or numbers, or tuples and dictionaries of these; turn text into "
        "numbers",
    ),
    "sample is None": (["data.name=user_mistakes:nothing"], "it is None; expected tensors"),
    "sample is sparse": (
        ["data.name=user_mistakes:sparse"],
        "its part 0 is a sparse tensor; return its to_dense",
    ),
    "sample is an image": (["data.name=user_mistakes:image"], "is a Image; .*turn images into"),
    "sample is empty": (["data.name=user_mistakes:empty"], "it is empty; expected tensors"),
    "other keys later": (
        ["data.name=user_mistakes:other_keys"],
        r"sample \d+ of .*: it is a dictionary with the keys input, \w+, but another is a "
        r"dictionary with the keys input, \w+",
    ),
    "rows of other lengths": (
        ["data.name=user_mistakes:ragged"],
        r"sample \d+ of .*: samples have the shapes \(\d,\) and \(\d,\); set data.pad=true to pad "
        "rows, or give a collate function",
    ),
    "longer than data.pad": (
        ["data.name=user_mistakes:ragged", "data.pad=3"],
        r"sample \d of .*: it has \d entries, more than data.pad=3; raise it, or cut rows",
    ),
    "no rows to pad": (
        ["data.name=user_mistakes:numbers", "data.pad=true"],
        r"data.pad=True expects rows, but a sample is a tuple of 2",
    ),
    "no such target": (
        ["data.name=user_mistakes:named", "data.target=y"],
        "data.target=y: a sample has no such key, but x, label",
    ),
    "only a target": (["data.name=user_mistakes:only_label"], "has only the key label; expected"),
    "no target": (
        ["data.name=user_mistakes:inputs_alone"],
        r"train.loss=cross_entropy expects .* but the samples have no target \(data.name=user_mist",
    ),
    "collate fails": (
        ["data.collate=user_mistakes:broken_collate"],
        r"sample \d+ of .*: broken_collate\(\) fails: KeyError: 'x'",
    ),
    "collate drops a row": (
        ["data.collate=user_mistakes:short_collate"],
        r"short_collate\(\) returned a tensor of shape \(1, 4\) for \d samples; expected one row",
    ),
    "data is a list of three": (
        ["data.name=user_mistakes:three"],
        "expected a Source, or training and validation data, got 3 values",
    ),
    "data is a generator": (
        ["data.name=user_mistakes:generator"],
        "a generator can be read only once; return an object whose __iter__ starts",
    ),
    "data is a number": (["data.name=user_mistakes:number"], "got a int"),
    "stream without a length": (
        ["data.name=user_mistakes:endless", "train.steps=null"],
        "is a stream of unknown length: set train.steps",
    ),
    "stream shorter than its length": (
        ["data.name=user_mistakes:long", "train.steps=3"],
        f"{DATA}: the stream ended after 8 samples, but its len.. is 100; correct it, or remove",
    ),
    "shards without lengths": (
        ["data.name=user_mistakes:unsized"],
        f"{DATA}: shard 0 has the length None; let len.. return its number of samples, or list",
    ),
    "empty stream": (["data.name=user_mistakes:dry"], "the stream has no sample"),
    "built-in model without classes": (
        ["model.name=mlp"],
        "model.name=mlp needs the number of classes: let the data function return a Source",
    ),
    "model is no module": (
        ["model.name=user_mistakes:no_module"],
        "model.name=user_mistakes:no_module: expected an nn.Module, got a function",
    ),
    "weight in a list": (
        ["model.name=user_mistakes:Held"],
        "the weight head.weight is also in Held.kept, which would keep the old tensor",
    ),
    "weights without a shape": (
        ["model.name=user_mistakes:lazy"],
        "user_mistakes:lazy: weight has no shape yet; give its module all sizes, or call the model",
    ),
    "no weight": (
        ["model.name=user_mistakes:still"],
        "user_mistakes:still: the model has no weight that can be trained",
    ),
    "weights without values": (
        ["model.name=user_mistakes:on_meta"],
        "user_mistakes:on_meta: weight is on the meta device, and nothing sets its values",
    ),
    "weights that the first call makes": (
        ["model.name=user_mistakes:Late"],
        r"the first forward\(\) made late.\w+, late.\w+, which no optimizer knows; make weights in",
    ),
    "metric with the name of a field": (
        ["train.metrics={seconds: 'user_mistakes:first'}"],
        "train.metrics.seconds: the name seconds is taken; use another, such as my_seconds",
    ),
    "two figures of one name": (
        ["train.metrics={a: 'user_mistakes:First', a_one: 'user_mistakes:first'}"],
        "train.metrics.a_one: another figure is called a_one too; give the metric another name",
    ),
    "metric without outputs": (
        ["train.loss=user_mistakes:good", "train.metrics=user_mistakes:first"],
        "train.loss=user_mistakes:good calls the model itself, so metrics would get no outputs",
    ),
    "numeric targets for classes": (
        ["data.name=user_mistakes:floats"],
        r"expects outputs \(rows, …, classes\) and class numbers .*torch.float32 \(data.name=.*"
        "use train.loss=mse",
    ),
    "loss is a mean": (
        ["train.loss=user_mistakes:mean"],
        r"train.loss=user_mistakes:mean: expected one loss per sample, a tensor of shape \(2,\), "
        r"got \(\); do not take the mean",
    ),
    "loss of a model returns a number": (
        ["train.loss=user_mistakes:alone"],
        "train.loss=user_mistakes:alone: expected a pair, the sum of the losses and the sum of",
    ),
    "loss of a model returns text": (
        ["train.loss=user_mistakes:worded"],
        "expected tensors or numbers as sums and weights, got a str",
    ),
    "loss of a model in a pipeline": (
        ["train.loss=user_mistakes:good", "parallel.strategy=pipeline"],
        "train.loss=user_mistakes:good calls the model itself, but a pipeline calls its layers",
    ),
    "model returns no loss": (
        ["train.loss=model", "data.name=user_mistakes:named", "model.name=user_mistakes:Silent"],
        "train.loss=model expects the model to return an object whose .loss is one number, got a T",
    ),
    "loss of the model needs names": (
        ["train.loss=model"],
        "train.loss=model expects samples that are dictionaries by the names .* got a tuple",
    ),
    "loss of the model is another mean": (
        [
            *("train.loss=model", "data.name=user_tasks:sentences", "data.pad=true"),
            *("model.name=user_tasks:Whole", "model.args.part=0.5"),
        ],
        "loss is not known to be a mean .*set train.loss_args.counts to what it is a mean of",
    ),
    "several inputs in a pipeline": (
        ["data.name=user_mistakes:named", "parallel.strategy=pipeline"],
        "a pipeline expects samples with one input, a tensor, got the inputs x; choose ddp",
    ),
    "metric is a mean": (
        ["train.metrics=user_mistakes:mean"],
        r"train.metrics.mean: expected one value for each sample, a tensor \(rows,\).* got \(\)",
    ),
    "watched metric is missing": (
        ["checkpoint.keep_best=top5"],
        "checkpoint.keep_best=top5: the evaluation has no such figure, but loss, accuracy",
    ),
    "optimizer is none": (
        ["optim.name=user_mistakes:no_optimizer"],
        "optim.name=user_mistakes:no_optimizer: expected a torch.optim.Optimizer, got a list",
    ),
    "pattern fits no weight": (
        ['optim.groups={"haed.*": {lr: 1}}'],
        r"optim.groups: no weight has a name like 'haed.\*'; the first is head.weight",
    ),
    "group has no such option": (
        ['optim.groups={"head.*": {decay: 1}}'],
        "optim.groups: adamw has no option 'decay'; it has lr, betas, eps, weight_decay",
    ),
    "optimizer cannot differentiate": (
        ["optim.args.differentiable=true"],
        "optim.name=adamw cannot make a step with these optim.args and optim.groups: `fused` does "
        "not support `differentiable`; change them, or choose another optimizer",
    ),
    "optimizer is for GPUs": (
        ["optim.name=RAdam", "optim.args.capturable=true"],
        "optim.name=RAdam cannot make a step .*: If capturable=True, params and state_steps must",
    ),
    "optimizer needs a closure": (["optim.name=LBFGS"], "LBFGS cannot make a step .*'closure'"),
    "optimizer needs sparse gradients": (["optim.name=SparseAdam"], "not support dense gradients"),
    "number in a group that the optimizer refuses": (
        ['optim.groups={"head.*": {betas: [0.9, 3]}}'],
        "optim.name=adamw cannot make a step .*: Invalid beta parameter at index 1: 3; change them",
    ),
    "group with weights": (
        ['optim.groups={"head.*": {params: 3}}'],
        r"optim.groups: the pattern 'head.\*' chooses the weights; remove params",
    ),
    "number that the optimizer refuses": (["optim.args.betas=[0.9, 2]"], "Invalid beta parameter"),
    "text in a group": (['optim.groups={"*": {eps: tiny}}'], "adamw cannot make a step .*'str'"),
    "packed shards": (
        ["data.name=user_mistakes:sharded", "data.pack=16"],
        f"data.pack: {DATA} has shards, and it is not known how many .* pack rows within",
    ),
    "row of a stream longer than data.pack": (
        ["data.name=user_mistakes:long_rows", "data.pack=5"],
        f"{DATA}: a row cannot be packed: it has 7 entries, more than data.pack=5",
    ),
    "model without forward": (
        ["model.name=user_mistakes:Forwardless"],
        r"user_mistakes:Forwardless: the class has no method forward",
    ),
    "model takes no such input": (
        ["data.name=user_mistakes:named"],
        r"model.name: forward\(\) of Net does not take the inputs x of the samples .*: missing a r",
    ),
    "model lets packed rows see each other": (
        [
            *("data.name=user_tasks:words", "model.name=user_mistakes:Summed", "data.pack=16"),
            "train.loss=next_token",
        ],
        "data.pack: the model lets rows of one sequence see each other; its attention must stay",
    ),
    "packed rows without positions": (
        ["data.name=user_tasks:words", "model.name=user_mistakes:Words", "data.pack=16"],
        "of Words does not take the inputs input_ids, position_ids of the samples .*: got an unex",
    ),
    "row longer than data.pack": (
        ["data.name=user_tasks:words", "data.pack=5"],
        r"data.name=user_tasks:words: row \d cannot be packed: it has \d+ entries, more than data.",
    ),
    "packed entries of other lengths": (
        ["data.name=user_mistakes:ragged", "data.pack=16"],
        "data.pack=16 expects each entry of a sample to be as long as its row, but a sample is a",
    ),
    "packed rows of one length": (
        ["data.name=digits", "data.pack=16"],
        "data.pack: the rows of data.name=digits have one length; remove it",
    ),
    "padded rows of one length": (
        ["data.name=digits", "data.pad=80"],
        "data.pad: the rows of data.name=digits have one length; remove it",
    ),
    "target of rows that have theirs": (
        ["data.name=digits", "data.target=label"],
        "data.target: the rows of data.name=digits have targets; remove it",
    ),
    "packed and padded": (
        ["data.pack=16", "data.pad=true"],
        "data.pack and data.pad both make batches of rows; remove one",
    ),
    "schedule returns text": (
        ["optim.schedule=user_mistakes:worded_schedule"],
        "optim.schedule=user_mistakes:worded_schedule: expected a finite number of at least 0, the",
    ),
    "schedule falls below 0": (
        ["optim.schedule=user_mistakes:falling_schedule", "train.steps=3"],
        r"expected a finite number of at least 0, .* for step=2 and steps=3, got -0\.3",
    ),
    "optimizer keeps a text": (
        ["optim.name=user_mistakes:Wordy"],
        "optim.name=user_mistakes:Wordy: its state has 'note', a str; let it hold dense tensors",
    ),
    "less than a sample": (
        ["train.epochs=0.01", "train.steps=null"],
        "train.epochs=0.01 of 8 samples is less than one sample; raise it, or set train.steps",
    ),
    "nothing but empty rows": (
        [
            *("data.name=user_mistakes:hollow", "model.name=user_mistakes:Words"),
            *("data.pad=true", "data.mask=null", "train.loss=next_token"),
        ],
        f"{DATA}: no target of the first 2 steps counts: rows are empty, all targets are -100",
    ),
    "validation samples of another kind": (
        ["data.name=user_mistakes:unlabelled"],
        f"{DATA}: the targets of the validation data are a tuple of 0, but those of the training",
    ),
    "no training sample": (
        ["data.name=user_mistakes:no_row"],
        f"{DATA}: the training data has no samples",
    ),
    "no sample in a further set": (
        ["data.name=user_mistakes:no_second"],
        f"{DATA}: the second validation data has no samples",
    ),
    "validation stream without a sample": (
        ["data.name=user_mistakes:dry_validation"],
        f"{DATA}: the first validation data has no samples",
    ),
    "data in a dictionary": (
        ["data.name=user_mistakes:library"],
        "expected a Source, or training and validation data, got a dictionary of train, validation",
    ),
    "class that the model does not have": (
        ["data.name=user_mistakes:other_classes"],
        r"a target is \d, but the model has 3 outputs, for the classes 0 to 2 \(data.name=",
    ),
    "key that is no name": (
        ["data.name=user_mistakes:keyed_by_number"],
        "sample 0 of .*: it has the key 0; expected names of parameters",
    ),
    "loss without a gradient": (
        ["train.loss=user_mistakes:detached"],
        "train.loss=user_mistakes:detached: the loss does not depend on the model's weights",
    ),
    "loss of outputs alone": (
        ["train.loss=user_mistakes:of_outputs"],
        "of_outputs: expected a function of .outputs, targets. or of .* too many positional arg",
    ),
    "figure without a weight": (
        ["train.loss=user_mistakes:lone_figure"],
        "lone_figure: expected a pair as right, its sum and the sum of its weights, got a int",
    ),
    "loss of the model is told as another mean": (
        [
            *("train.loss=model", "data.name=user_tasks:sentences", "data.pad=true"),
            *("model.name=user_tasks:Whole", "train.loss_args.counts=rows"),
            "data.global_batch=1",
        ],
        "counts=rows: the model's .loss is another mean of its cross entropy; set counts=next",
    ),
    "logger is a member": (
        ["log.to.x=user_mistakes:Reporting"],
        r"log.to.x=user_mistakes:Reporting: a logger is on rank 0 alone.*use train.callbacks",
    ),
    "callback reports a text": (
        ["train.callbacks.x=user_mistakes:Reporting", "train.callbacks.x.args.value=a"],
        r"train.callbacks.x: expected report\(\) to return numbers by name: \{'mine': 'a'\}",
    ),
    "callback changes its names": (
        ["train.callbacks.x=user_mistakes:Reporting", "train.callbacks.x.args.numbered=true"],
        r"train.callbacks.x: report\(\) returns mine, mine\d only in some steps",
    ),
    "callback returns no action": (
        ["train.callbacks.x=user_mistakes:Reporting", "train.callbacks.x.args.action=true"],
        r"train.callbacks.x: expected settle\(\) to return an Action, got True",
    ),
    "callback has no method": (
        ["train.callbacks=user_mistakes:no_callback"],
        "train.callbacks.no_callback=user_mistakes:no_callback: expected an object with one of the",
    ),
    "logger is not installed": (
        ["log.to=user_mistakes:Missing"],
        "log.to.Missing=user_mistakes:Missing needs the package not_here: pip install not_here",
    ),
}


FINE = {
    "good": [],
    "inputs alone": ["data.name=user_mistakes:inputs_alone", "train.loss=user_mistakes:of_inputs"],
    "unusual model": ["model.name=user_mistakes:Unusual", "optim.ema=0.5"],
    "schedule of NumPy": ["optim.schedule=user_mistakes:numpy_schedule"],
    "one output": ["model.name=user_mistakes:one_output", "train.loss=user_mistakes:of_two"],
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The exception of each mistake, all in one process: a pipeline of one rank refuses too."""
    root = tmp_path_factory.mktemp("mistakes")
    ends, its = multiprocessing.Pipe(duplex=False)
    process = FORKSERVER.Process(target=_make_mistakes, args=(its, str(root), free_port()))
    process.start()
    its.close()
    assert ends.poll(TIMEOUT)
    found: dict[str, list[Any]] = ends.recv()
    process.join(TIMEOUT)
    return found


@pytest.mark.parametrize("name", TABLE)
def test_one_sentence_names_what_is_wrong(name: str, refusals: dict[str, list[Any]]) -> None:
    kind, message, trained = refusals[name]
    assert kind == "ConfigError", message
    assert "\n" not in message
    assert re.search(TABLE[name][1], message), message
    assert trained is not False, "a run that never trained a step has left its directory"


def test_the_same_without_a_mistake_trains(refusals: dict[str, list[Any]]) -> None:
    for name in FINE:
        kind, _, figures = refusals[name]
        assert (kind, "loss" in figures) == ("", True), refusals[name]
        has_classes = name not in ("inputs alone", "one output")
        assert ("accuracy" in figures) is has_classes, name
    assert len(TABLE) >= 60


def _make_mistakes(pipe: Any, root: str, port: int) -> None:
    sys.path.insert(0, str(HELPERS))
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(port)}
    os.environ.update(place, MASTER_ADDR="127.0.0.1")
    from rollcall.config import parse
    from rollcall.records.run_dir import RunDir
    from rollcall.train.ranks.signals import StopSignals
    from rollcall.train.ranks.world import World
    from rollcall.train.training import train

    found: dict[str, list[Any]] = {}
    with StopSignals() as signals:
        world = World.join("cpu")
        cases = {**{name: words for name, (words, _) in TABLE.items()}, **FINE}
        for number, (name, words) in enumerate(cases.items()):
            given = {word.partition("=")[0] for word in words}
            rest = [f"{key}={value}" for key, value in GOOD.items() if key not in given]
            try:
                _, config = parse([*rest, *words, f"run.root={root}", f"run.name=m{number}"])
                state = train("mistake", config, world, signals)
                [event] = RunDir(Path(root), f"m{number}").read_events("evaluated")
                found[name] = ["", state, event]
            except Exception as error:
                run = RunDir(Path(root), f"m{number}")
                verdict = run.read_verdict()
                left = verdict is not None and verdict.step > 0 if run.path.exists() else None
                found[name] = [type(error).__name__, str(error), left]
        world.leave()
    pipe.send(found)
