"""Launch and supervise runs: their submission, their coordinator, and the agents on the nodes."""
