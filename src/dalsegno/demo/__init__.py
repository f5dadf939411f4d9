"""Scenes that show what the product does, on a real cluster; also the acceptance tests."""
