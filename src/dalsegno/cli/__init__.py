"""The command line: a file per command, one printer, one catch."""
