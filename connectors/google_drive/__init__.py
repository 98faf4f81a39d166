"""Source kind ``google-drive``: files of Google Drive, their access and their changes."""

from connectors.google_drive.options import GoogleDriveOptions
from connectors.google_drive.source import GoogleDrive

__all__ = ["GoogleDrive", "GoogleDriveOptions"]
