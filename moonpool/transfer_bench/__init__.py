"""`moonpool bench messenger`: how fast, and whether rightly, KV would go between two hosts, over the real messenger."""
