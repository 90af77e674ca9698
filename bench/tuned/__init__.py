"""``holdfast bench URI --tune``: finds the options with which saves and loads are fastest.

``space`` lists the options to try. ``halving`` is the search, a pure state machine. ``trial``
measures one candidate with the real engine. ``gain`` computes how certain a difference is.
``tuning`` combines them.
"""
