"""``holdfast bench URI --tune``: the options with which saves and loads are fastest.

``space`` says which options are tried; ``halving`` is the search, a pure state machine; ``trial``
measures one choice by the real engine; ``gain`` says how sure a difference is; ``tuning`` puts them
together.
"""
