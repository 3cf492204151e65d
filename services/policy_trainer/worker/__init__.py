"""The worker: owns model, optimizer and gradients on one compute thread, and answers the driver from another."""
