"""torch, Lightning, accelerate, transformers: torchrun's variables are all that they need."""

from rollcall.launch.frameworks.framework import Framework

FRAMEWORK = Framework(
    frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "transformers"}),
    lambda _: {},
    meets_at_master=True,
)
