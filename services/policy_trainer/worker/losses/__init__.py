"""The terms of the loss, one family per file: small pure functions of tensors that neither sum nor normalise."""

from services.policy_trainer.worker.losses.value import value_loss

__all__ = ["value_loss"]
