"""The HTTP server and the command line. The engine and the scheduler never import it."""
