"""Executes the driver's calls on one rank, by subject: training, weights and state. Importing it imports torch."""
