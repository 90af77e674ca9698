"""What runs next, on which thread, in which memory."""
