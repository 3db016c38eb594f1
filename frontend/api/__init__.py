"""HTTP layer of OpenAI's API: routes, pydantic models, response formats. It contains no serving logic."""
