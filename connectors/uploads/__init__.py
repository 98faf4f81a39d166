"""Source kind ``uploads``: files that users upload over HTTP or put into a drop folder."""
