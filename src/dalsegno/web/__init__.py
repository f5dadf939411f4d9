"""The web page: sessions and roles, a live snapshot of the cluster, pages as HTML, and actions."""
