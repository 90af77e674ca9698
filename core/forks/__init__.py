"""What a forked child has to find anew: locks, groups of tasks, values that were computed once."""
