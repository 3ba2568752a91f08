"""The program `rollcall`: its table of commands, its parser, where this copy lies."""
