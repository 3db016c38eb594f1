"""`moonpool bench messenger`: speed and integrity of KV transfers between two hosts, with the real messenger."""
