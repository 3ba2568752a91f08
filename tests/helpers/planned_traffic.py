"""The messages of a rank in a training step under rollcall's own strategies, as closed forms.

Small ones that a model or a loss of the user's may add are left out: DDP's search for unused
weights, its buffers, and the weights that a loss returns.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollcall.tools.plan.layout import Layout
from rollcall.tools.plan.model import HALF, Model, Part
from rollcall.tools.plan.step_time import BUCKET, FULL


@dataclasses.dataclass(frozen=True)
class Sized(Part):
    """A part of which the messages are counted, too.

    Attributes:
        tensors: the number of weights as tensors, of which tensor ranks divide `cut_tensors`.
        units: what FSDP gathers as one.
    """

    tensors: float = 1
    cut_tensors: int = 0
    units: float = 1

    @staticmethod
    def of(model: Model) -> list["Sized"]:
        """Return the parts of a gpt, in order."""
        first, *layers, last = [
            vars(part) for part in (model.first, *[model.layer] * model.layers, model.last)
        ]
        untied = 1 - model.tied
        return [
            Sized(**first, cut_tensors=1),
            *[Sized(**layer, tensors=8, cut_tensors=6) for layer in layers],
            Sized(**last, tensors=1 + untied, cut_tensors=untied, units=1 + untied),
        ]


class Group(NamedTuple):
    """The ranks of a collective: neighbours are `apart` ranks from each other.

    To "send" and "receive" has one of them as a peer.
    """

    kind: str
    ranks: int
    apart: int


class Sent(NamedTuple):
    """The number of messages, and the sum of their bytes; of an all-gather the gathered ones."""

    messages: float
    size: float


class Messages(dict[Group, Sent]):
    """The messages of a rank, by kind and group."""

    def add(self, kind: str, ranks: int, apart: int, count: float, size: float) -> None:
        """Add messages; a group of one rank sends none."""
        if ranks > 1 and count:
            group = Group(kind, ranks, apart)
            before = self.get(group, Sent(0, 0))
            self[group] = Sent(before.messages + count, before.size + size)

    def total(self) -> float:
        """Return the bytes of all messages."""
        return sum(sent.size for sent in self.values())


def of_passes(
    parts: Sequence[Sized],
    held: Sequence[range],
    layout: Layout,
    trained: Sequence[Sized] | None = None,
) -> Messages:
    """Return the messages of the forward and backward passes of a step.

    `held` are the pieces of the model on the rank, as places in `parts`. `trained` are the same
    parts without the weights that have no gradient.
    """
    learns = trained or parts
    messages = Messages()
    _add_gradients(messages, _own(parts, held), _own(learns, held), layout)
    for number in (number for piece in held for number in piece):
        is_entry = number == 0 and not learns[0].tensors  # its input needs no gradient
        _add_sums(messages, parts[number], layout, is_entry)
        if layout.sequence:  # of weights that see only a piece of each sequence
            part = learns[number]
            count, values = part.tensors - part.cut_tensors, part.weights - part.cut_weights
            messages.add("all-reduce", layout.tensor, 1, count, FULL * values)
        _add_exchanges(messages, parts[number], layout)
    apart = layout.ranks // layout.stages
    for piece in held:
        for edge in {piece.start, piece.stop} - {0, len(parts)}:
            size = _activations(parts[edge - 1].boundary, layout)
            size /= layout.tensor if layout.sequence else 1
            forth, back = ("receive", "send") if edge == piece.start else ("send", "receive")
            messages.add(forth, layout.stages, apart, layout.micro_batches, size)
            if any(part.tensors for part in learns[:edge]):
                messages.add(back, layout.stages, apart, layout.micro_batches, size)
    return messages


def of_update(parts: Sequence[Sized], held: Sequence[range], layout: Layout) -> Messages:
    """Return the messages of the new weights.

    Only `parts` that have a gradient count. The 8 bytes of the gradient's norm over each group of
    ranks are left out, as the recorder leaves out those of the number of targets.
    """
    messages, held_parts = Messages(), _own(parts, held)
    if layout.zero == 1:
        size, tensors = FULL * _values(held_parts, layout), sum(part.tensors for part in held_parts)
        messages.add("broadcast", layout.shards, layout.tensor, tensors, size)
    return messages


def _add_sums(messages: Messages, part: Sized, layout: Layout, is_entry: bool) -> None:
    """Add what tensor ranks exchange; nothing goes back to the `is_entry`, a frozen embedding."""
    often, again = layout.micro_batches, bool(part.attention) and layout.recompute == "full"
    if part.outputs:  # two numbers in fp32 for each token's loss
        size = layout.tensor * 2 * FULL * part.products[-1].rows * HALF / layout.width
        messages.add("all-gather", layout.tensor, 1, often, _activations(size, layout))
    # The output of a layer's last product is not computed again.
    sums, size = part.messages + again, _activations(part.boundary, layout)
    if not layout.sequence:
        messages.add("all-reduce", layout.tensor, 1, sums * often, sums * size)
        return
    messages.add("reduce-scatter", layout.tensor, 1, sums * often, sums * size)
    gathers = part.messages * (not is_entry) + 2 * again
    messages.add("all-gather", layout.tensor, 1, gathers * often, gathers * size)


def _add_exchanges(messages: Messages, part: Sized, layout: Layout) -> None:
    """Add queries, keys, values and outputs, which change their cut, there and back."""
    if not (attention := part.attention):
        return
    passes = 3 if layout.recompute == "full" else 2
    shared = math.lcm(attention.kv_heads // layout.tensor, layout.context)
    values = 2 * (attention.heads // layout.tensor + shared) * attention.width * attention.length
    size = passes * HALF * _activations(values, layout)
    count = 4 * passes * layout.micro_batches
    messages.add("all-to-all", layout.context, layout.tensor, count, size)


def _activations(size: float, layout: Layout) -> float:
    """Return the bytes of activations in a step, for bytes per sample in 16 bits."""
    samples = layout.batch // layout.data
    if layout.stages > 1:  # all micro-batches have one size
        samples = layout.micro * layout.micro_batches
    return size * layout.width / HALF * samples / layout.context


def _add_gradients(
    messages: Messages, held: Sequence[Sized], trained: Sequence[Sized], layout: Layout
) -> None:
    """Add what FSDP, or DDP, sends of weights and gradients, which are added up in fp32."""
    group, shards, apart = layout.data * layout.context, layout.shards, layout.tensor
    size = FULL * _values(trained, layout)
    units, sent = (sum(part.units for part in some) for some in (held, trained))
    if layout.zero < 2:
        wraps = layout.tensor > 1 or layout.stages > 1  # DDP does not support them; FSDP does
        messages.add("all-reduce", group, apart, sent if wraps else math.ceil(size / BUCKET), size)
        return
    times, kept = 1, 0
    if layout.zero == 3:  # a pipeline keeps the weights from a backward pass to the next pass
        times = layout.micro_batches + 1 if layout.stages > 1 else 2 * layout.micro_batches
        kept = layout.micro_batches  # passes for which the last unit is gathered already
    last = next(part for part in reversed(held) if part.units)
    if last.units > 1:  # the norm before the head is a unit of its own
        last = dataclasses.replace(last, weights=last.cut_weights)
    count = times * units - kept
    gathered = layout.width * (times * _values(held, layout) - kept * _values([last], layout))
    messages.add("all-gather", shards, apart, count, gathered)
    messages.add("reduce-scatter", shards, apart, sent, size)
    messages.add("all-reduce", group // shards, apart * shards, sent, size / shards)


def _own(parts: Sequence[Sized], held: Sequence[range]) -> list[Sized]:
    return [parts[number] for piece in held for number in piece]


def _values(parts: Iterable[Sized], layout: Layout) -> float:
    """Return the number of weights on a rank of a tensor group."""
    return sum(part.weights - part.cut_weights * (1 - 1 / layout.tensor) for part in parts)


def _merged(*several: Messages) -> Messages:
    merged = Messages()
    for messages in several:
        for group, sent in messages.items():
            merged.add(*group, *sent)
    return merged
