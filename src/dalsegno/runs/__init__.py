"""Launching a run and keeping it alive: generations, their coordinator, and the agents on the nodes."""
