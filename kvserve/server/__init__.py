"""The HTTP server and the command line. Nothing below this package imports it."""
