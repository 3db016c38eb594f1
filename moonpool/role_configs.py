"""From a role's settings to the configuration object of the package that serves it: every field mapped here once.

Imports the serving packages, so it is imported only by the process that becomes the role.
"""
