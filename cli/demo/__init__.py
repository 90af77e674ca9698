"""``holdfast demo``: a language model in training loses a rank in the middle of a save, and goes on
with fewer.

``run`` tells the story; ``train`` is the training script, and ``model`` and ``data`` what it
trains, and on what; ``jobs`` starts it under torchrun, ``journal`` and ``record`` say how it went;
``torn`` looks at what a kill leaves; ``account`` and ``picture`` are for the reader.

``holdfast keeper demo``: hosts that keep steps in memory break down. ``keepers`` tells the story;
``train_kept`` is the training script, ``hosts`` has the keepers, and ``aftermath`` what came of it.
"""
