"""The wire forms of OpenAI's API, for those who serve it."""
