"""The kill campaign: a real run on a real cluster, broken at drawn moments, and judged after every trial."""
