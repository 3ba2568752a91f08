"""The login node's half of rollcall: check, render, submit, follow. It never imports torch."""
