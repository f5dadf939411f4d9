"""Launch and supervision of runs: generations, their coordinator, and the agents on the nodes."""
