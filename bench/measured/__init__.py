"""``holdfast bench URI``: what a storage gives checkpoints, beside what it gives its driver alone.

``plan`` says what is measured, and refuses before any I/O what cannot be; ``run`` measures;
``alone`` is the limit; ``result`` is what was found, as JSON; ``validity`` says whether it may be
believed; ``comparison`` holds one result against another.
"""
