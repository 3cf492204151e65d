"""The worker owns the model, the optimizer and the gradients on a compute thread and answers the driver from another
thread."""
