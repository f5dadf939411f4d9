"""The command line: a file per command or small group of commands, one printer, one place that catches errors."""
