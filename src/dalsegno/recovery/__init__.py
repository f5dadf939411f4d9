"""Node recovery: the controller on the head node, the coordinators that it starts, and the client of the controller's
socket."""
