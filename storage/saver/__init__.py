"""The saver: a process that writes the images of one trainer, and outlives it to commit them."""
