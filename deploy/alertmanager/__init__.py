"""The configuration of Alertmanager: who is notified of which alert, and which alerts follow from others.

``python -m deploy.alertmanager FILE`` writes it.
"""
