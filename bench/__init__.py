"""What can this storage really do for checkpoints? Programs that measure against the limit and the
peers."""
