"""Publishes the policy's weights: puts and canaries, the start-up drill, earlier versions, and sending to engines."""
