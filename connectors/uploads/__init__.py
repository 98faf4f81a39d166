"""Files handed to us, by HTTP or in a drop folder, as a source."""
