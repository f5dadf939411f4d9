"""The web page: sessions and roles, the live picture of the cluster, pages as HTML, and actions."""
