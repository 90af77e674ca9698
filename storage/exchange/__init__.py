"""Ranks hand each other what they have read, once both sides have proved who they are."""
