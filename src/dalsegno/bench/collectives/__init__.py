"""Collectives between ranks, and all-reduces between every pair of nodes."""
