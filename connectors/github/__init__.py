"""GitHub: issues, pull requests and discussions as documents, the collaborators of repositories as access."""

from connectors.github.options import GitHubOptions
from connectors.github.source import GitHub

__all__ = ["GitHub", "GitHubOptions"]
