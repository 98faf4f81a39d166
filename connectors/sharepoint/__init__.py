"""Source kind ``sharepoint``: files and pages of SharePoint and OneDrive, through Microsoft Graph."""

from connectors.sharepoint.options import SharePointOptions
from connectors.sharepoint.source import SharePoint

__all__ = ["SharePoint", "SharePointOptions"]
