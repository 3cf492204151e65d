"""Users' code (reward functions and workflows) in processes that the service can kill."""
