"""Object stores and file servers that fsspec reads: S3, Google Cloud Storage, Azure, SFTP and others."""
