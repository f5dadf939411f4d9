"""The command line: one folder per group of commands, one module that prints, one place for errors."""
