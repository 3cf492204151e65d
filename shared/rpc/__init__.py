"""Requests and replies over ZeroMQ. Every request has a deadline and an id, and retries are answered once."""
