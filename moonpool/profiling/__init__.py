"""`moonpool bench profile`: measured and fitted costs of a model's work on this machine."""
