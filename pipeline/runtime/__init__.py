"""Settings, state folder, credentials, tasks and the HTTP server that every process shares."""
