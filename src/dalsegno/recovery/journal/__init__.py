"""What the controller keeps on disk: events, actions, evidence, and metrics made from them."""
