"""The node agent: heartbeats, findings and the controller's orders, in one small thread that never blocks."""
