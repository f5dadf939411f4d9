"""Checkpoints on disk. Nothing is loaded before it is asked for: what lists and verifies costs no torch."""
