"""Closed forms for what a run needs: memory, step time, layouts, cost. No torch."""
