"""OpenAI's Responses API without stored state: its body, which becomes a chat, and its responses."""
