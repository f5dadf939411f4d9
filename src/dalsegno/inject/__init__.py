"""Fault injection: cause the faults that real nodes have, on a target's nodes or in a user's own jobs.

A lasting fault is recorded before it begins, so that it can be undone. `dalsegno up` imports this package only if it
finds such a record.
"""
