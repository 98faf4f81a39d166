"""The state of the system and its causes: lag, health and the story of a document.

`status`, the page, `why` and the metrics all read it here.
"""
