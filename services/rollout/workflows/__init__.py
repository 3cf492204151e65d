"""Workflows: coroutines of users that make one sample each, with as many calls of the policy as they like."""
