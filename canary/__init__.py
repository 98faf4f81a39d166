"""The worker ``canary``: publishes documents of our own as a connector does, and looks for them as a person does."""
