"""Workflows: user coroutines that each make one sample, with any number of calls to the policy."""
