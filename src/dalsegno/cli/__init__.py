"""The command line: a folder per group of commands, one printer, one place that catches errors."""
