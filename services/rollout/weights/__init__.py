"""How a policy version gets into the engine."""
