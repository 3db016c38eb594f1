"""`moonpool top`: a running cluster in a terminal, as `top` shows a machine."""
