"""The operating system: files, processes, clocks, addresses, the fabric. No torch."""
