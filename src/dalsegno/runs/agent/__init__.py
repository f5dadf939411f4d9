"""The processes on every node of a run, in the user's own Python (3.9 and later): agent, warm parent, helpers."""
