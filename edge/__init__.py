"""The HTTP front: OpenAI's routes in front of the bus. Never imports torch."""
