"""Three demos: training that loses a rank or hosts, and fine-tuning that saves what changed.

``holdfast demo`` trains a language model, kills a rank in the middle of a save, and resumes with
fewer ranks. ``run`` tells the story by its ``plan``, and ``train`` is the training script. ``torn``
lists the leftovers of a killed save, and ``picture`` draws the losses.

``holdfast keeper demo`` loses hosts that keep steps in memory. ``keepers`` tells the story,
``train_kept`` is the training script, and ``hosts`` runs the keepers.

``holdfast demo --incremental`` saves whole and incrementally. ``incremental`` tells the story, and
``train_incremental`` is the training script.

All train ``model`` on ``text``. ``jobs`` starts the scripts under torchrun, ``journal`` collects
their progress, and ``account`` prints it.
"""
