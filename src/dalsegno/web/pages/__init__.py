"""The pages: they turn the snapshot of the cluster, and data that is read when a page is opened, into HTML."""
