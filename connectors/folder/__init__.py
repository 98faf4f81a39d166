"""Folders and files of this machine as a source."""
