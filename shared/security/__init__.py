"""Access to a run over the network: keys, roles, and the messages that each role may send."""
