"""Read what runs have left in their directories."""
