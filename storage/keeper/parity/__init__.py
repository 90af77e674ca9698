"""Parity of other hosts' images, and rebuilding lost images from it."""
