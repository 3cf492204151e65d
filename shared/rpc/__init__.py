"""Requests and replies over ZeroMQ. Every request has a deadline, and an id by which a peer recognizes retries."""
