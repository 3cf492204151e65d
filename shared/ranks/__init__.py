"""The ranks that share a model: their layout, their rendezvous and their process group."""
