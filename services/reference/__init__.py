"""The actors of the reference and of the teacher score tokens with a frozen model."""
