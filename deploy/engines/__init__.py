"""Checks docker-compose.yml and deploy/Dockerfile in a real Docker engine: ``make engines``."""
