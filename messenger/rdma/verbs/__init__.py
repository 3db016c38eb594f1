"""The verbs shell: devices, registrations, windows, queue pairs and completions. Only this package imports pyverbs."""
