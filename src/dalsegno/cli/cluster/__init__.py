"""Commands that create, show, change and remove clusters."""
