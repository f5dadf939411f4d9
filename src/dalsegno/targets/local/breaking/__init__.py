"""Breaking nodes on purpose, as real ones break; what lasts is written down before it begins, and can be undone."""
