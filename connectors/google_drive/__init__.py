"""Google Drive: documents, who may read them, and what changes."""

from connectors.google_drive.options import GoogleDriveOptions
from connectors.google_drive.source import GoogleDrive

__all__ = ["GoogleDrive", "GoogleDriveOptions"]
