"""The HTTP face: OpenAI's API in pydantic models, routes and responses. What it means is decided outside."""
