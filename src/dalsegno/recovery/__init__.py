"""Node recovery: the controller on the head node, the coordinators it starts, and the client of its socket."""
