"""Small real services that stand in for the ones that need torch, and a launcher that starts them."""
