"""The processes on each node of a run: agent, warm parent and helpers. They run in the user's Python (3.9 or later)."""
