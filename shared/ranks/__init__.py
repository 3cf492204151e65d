"""Ranks that hold pieces of one model: how they are arranged, how they meet, how their process group opens."""
