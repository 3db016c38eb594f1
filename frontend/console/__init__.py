"""The console: a page that shows a running cluster, its data (updated every second), and the admins' actions.

The files in `page/` are served unchanged: no build step, no third-party code, no requests to other hosts.
"""
