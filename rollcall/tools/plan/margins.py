"""The interval around a planned time, from the errors of rows that the fit has not seen.

margins.yaml has the 5th and 95th percentiles of measured over planned times, for each kind of
layout: of programs that the fit has seen, of programs that it has not, and after one measured run.
`tests/campaigns/fit_planner.py` computes them.
"""

import math
from pathlib import Path
from typing import NamedTuple

from rollcall.config import yaml_values
from rollcall.config.checks import SPLIT_BACKWARD
from rollcall.tools.plan.layout import Layout
from rollcall.tools.plan.machine import Machine
from rollcall.tools.plan.model import Model

KNOWN = yaml_values.load(Path(__file__).with_name("margins.yaml").read_text())


class Margin(NamedTuple):
    """Measured over planned time, in nine of ten runs, for a kind of layout."""

    kind: str
    low: float
    high: float
    unknown: tuple[str, ...]  # what no measurement has been compared with

    def text(self) -> str:
        """Return the sentence for a plan."""
        more = f"; not measured, so the range is wider: {', '.join(self.unknown)}"
        return (
            f"Nine of ten runs of this kind ({self.kind}) took {self.low:.2f} to {self.high:.2f} "
            f"times the planned time{more if self.unknown else ''}."
        )


def margin(model: Model, layout: Layout, machine: Machine) -> Margin:
    """Return the interval of a layout's time."""
    known, kind, chip = KNOWN, kind_of(model, layout, machine), machine.chip.name
    source = "fitted" if machine.software.name in known["seen"] else "other"
    source = "calibrated" if machine.factor != 1 else source
    unknown = {
        "context parallelism": layout.context > 1,
        f"parallel.schedule={layout.schedule}": layout.schedule in SPLIT_BACKWARD,
        chip: machine.factor == 1 and chip.partition("-")[0] not in known["chips"],
        f"more than {known['most']} GPUs": layout.ranks > known["most"],
    }
    missing = tuple(what for what, is_so in unknown.items() if is_so)
    wider = math.exp(known["wider"] * len(missing))
    low, high = known["kinds"][kind][source]
    return Margin(kind, low / wider, high * wider, missing)


def kind_of(model: Model, layout: Layout, machine: Machine) -> str:
    """Return the first kind that fits, of layouts whose errors are alike."""
    stages, tensor, crosses = layout.stages, layout.tensor, layout.ranks > machine.node
    kinds = {
        "mixture of experts": model.experts > 1,
        "tensor groups over nodes": tensor > machine.node,
        "pipeline and tensor over nodes": stages > 1 < tensor and crosses,
        "few micro-batches a stage": stages > 1 and layout.micro_batches < 4 * stages,
        "few tokens a GPU": layout.batch * model.length < 4096 * layout.ranks,
        "pipeline": stages > 1,
        "tensor": tensor > 1,
        "sharded": layout.zero == 3,
    }
    return next((kind for kind, fits in kinds.items() if fits), "replicas")
