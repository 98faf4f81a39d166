"""Conversations: what members asked and were answered. Served over HTTP (``api.router``), not crawled: there is no
Source here. Whoever answers the questions sends them, here or straight to ``conversations.live.v1``."""
