"""The controller's data on disk: events, actions and evidence, and the metrics computed from them."""
