"""Who may connect to a run over the network, as what, and which messages they may send."""
