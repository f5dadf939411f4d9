"""The command line: one file per command or group of commands, one module that prints, one place for errors."""
