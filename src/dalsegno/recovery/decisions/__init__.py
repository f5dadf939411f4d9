"""The pure part of recovery: facts, records and policy in, actions out."""
