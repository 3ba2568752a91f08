"""Preloaded first by the server of forked ranks: collections would take a fifth of the imports."""

import gc

gc.disable()
