"""The controller's side of the node agents: their server, their presence and their orders."""
