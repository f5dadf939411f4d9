"""The reports that a coordinator writes about its run: status, goodput and history."""
