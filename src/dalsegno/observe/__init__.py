"""Metrics, Prometheus' configuration, dashboards, and the HTTP server that metrics and the web page share."""
