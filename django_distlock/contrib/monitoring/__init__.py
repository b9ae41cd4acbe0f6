"""Endpoints for machines and dashboards, alarm rules for Prometheus, a dashboard for Grafana."""
