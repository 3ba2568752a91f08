"""Reports of runs as one HTML file, from the run directory alone. No torch."""
