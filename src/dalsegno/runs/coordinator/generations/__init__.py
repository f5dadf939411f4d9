"""The state machine of a run: generations, their members and their snapshots."""
