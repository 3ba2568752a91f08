"""Accept a machine or an allocation: one page that says what works there."""
