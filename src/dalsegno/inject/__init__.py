"""Fault injection: cause faults like those of real nodes, through the interface `NodeAccess` of a target.

A fault that lasts is recorded before it begins, so that it can be undone. `dalsegno up` imports this package only if it
finds such a record.
"""
