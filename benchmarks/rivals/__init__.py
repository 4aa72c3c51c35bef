"""Libraries that a user would take instead of lastgood: what a save costs there (benchmarks/rivals/__main__.py)."""
