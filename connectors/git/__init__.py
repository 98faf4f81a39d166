"""Source kind ``git``: repositories of wikis and code, read with the ``git`` command."""
