"""Publishes the policy's weights: puts, canaries, the start-up drill, earlier versions, and transfers to engines."""
