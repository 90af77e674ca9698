"""Ranks hand each other what they have read, over connections on which both sides are
authenticated."""
