"""Commands that run on another machine: `rollcall submit --host login.cluster …`."""
