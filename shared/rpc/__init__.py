"""Requests and replies over ZeroMQ: every request has a deadline and an id, every retry is answered once."""
