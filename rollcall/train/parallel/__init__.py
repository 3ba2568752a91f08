"""How the model is spread over the ranks: a mesh, and one `Part` for each of its dimensions.

`strategy.py` applies them in the order pipeline, tensor, context, shard, replicate. A new strategy
is a file with a `Part` and a line in `PRESETS` of `rollcall/config/mesh.py`; a new dimension also
needs its name in `DIMENSIONS` and a line in `assembly.parts`.
"""
