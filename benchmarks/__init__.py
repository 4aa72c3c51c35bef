"""Measurements: nothing in here is part of the package, and nothing in it decides anything."""
