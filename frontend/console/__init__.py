"""The console: a page that shows a running cluster, what it is told once a second, and what an admin may do there.

`page/` is served as it lies there: no build step, no code from elsewhere, no request to anywhere else.
"""
