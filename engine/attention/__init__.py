"""Attention backends of this engine."""
