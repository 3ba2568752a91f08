"""Inject faults into a live run and measure the recovery."""
