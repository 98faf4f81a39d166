"""The pure centre: no I/O, no clock, no settings. Everything here can be tested with literals."""
