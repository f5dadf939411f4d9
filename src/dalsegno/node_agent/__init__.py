"""The node agent: heartbeats, findings, and what the controller orders. One thread, small, and never held up."""
