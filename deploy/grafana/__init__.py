"""Dashboards as code: ``python -m deploy.grafana.dashboards`` writes the JSON files beside it."""
