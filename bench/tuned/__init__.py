"""``holdfast bench URI --tune``: finds the options with which saves and loads are fastest.

``plan`` lists the options to try, ``halving`` searches among them, and ``tuning`` measures with the
real engine and computes how certain a difference is.
"""
