"""Processes of the tests that start in a fraction of the time: their imports are done once and shared."""
