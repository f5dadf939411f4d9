"""The processes of a run on each node: agent, warm parent and helpers. They run in the user's Python (3.9 or later)."""
