"""Two demos: training that loses a rank, and training that loses hosts.

``holdfast demo`` trains a language model, kills a rank in the middle of a save, and resumes with
fewer ranks. ``run`` tells the story by its ``plan``. ``train`` is the training script, with its
``model`` and ``text``. ``jobs`` starts it under torchrun; ``journal`` collects its progress.
``torn`` lists what a killed save leaves. ``account`` and ``picture`` present the results.

``holdfast keeper demo`` loses hosts that keep steps in memory. ``keepers`` tells the story.
``train_kept`` is the training script, and ``hosts`` runs the keepers.
"""
