"""The command line: one file per command, one printer, one place that catches errors."""
