"""The worker owns model, optimizer and gradients on a compute thread and answers the driver from another thread."""
