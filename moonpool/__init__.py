"""The application: command line, configuration, and the processes of a cluster. Nothing below imports it."""
