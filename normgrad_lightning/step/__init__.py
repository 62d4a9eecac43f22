"""When to look, at what, and what to tell the user."""
