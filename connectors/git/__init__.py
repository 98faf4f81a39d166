"""Git repositories: engineering wikis and code, by the ``git`` command."""
