"""What keeps things going: the controller on the head node, the coordinators it keeps, and how to ask it."""
