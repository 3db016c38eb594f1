"""Anthropic's Messages API: its bodies, which become chats, and its responses."""
