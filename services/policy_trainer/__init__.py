"""policy_trainer."""
