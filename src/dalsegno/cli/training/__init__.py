"""Commands that start, follow and examine training runs."""
