"""Recorders of what other libraries compute. They run in the environments of those libraries, and no test runs them."""
