"""What a coordinator writes about its run: status, goodput and history."""
