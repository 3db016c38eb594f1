"""`moonpool chat`: a conversation in the terminal with a running cluster, over its OpenAI API."""
