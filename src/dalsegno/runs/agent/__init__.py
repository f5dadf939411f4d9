"""The processes on every node of a run: agent, warm parent, helpers. They run in the user's Python (3.9 or later)."""
