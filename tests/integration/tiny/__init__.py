"""Small real services that replace those that need torch, and a launcher that starts them."""
