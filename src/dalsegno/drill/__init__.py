"""A game day: faults drawn by lot, what came of each, and the report of it."""
