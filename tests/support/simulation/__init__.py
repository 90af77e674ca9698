"""The simulator: the real engine on simulated machines, clocks and storage, all of it decided by
one seed.

``loop``       virtual time, and processes that can pause and die
``schedule``   what a run does: storage, actors, faults, delays; made from a seed, and written down to be replayed
``posix``      a file system with a volatile and a durable side, under the real local driver
``remote``     an object store, and HDFS, with requests that are refused, lost, late or done twice
``engine``     the real engine without threads, with small chunks
``world``      one run: processes, storage, faults at their moment
``actors``     saves, loads, copies, pruning, as jobs of several ranks
``endings``    what is left when everybody dies at some moment of a run, or when it is over
``checker``    what must hold at each moment, and of what survives
``broken``     engines that are wrong on purpose
``blocking``   calls that block, each in a thread, one thread at a time
``channels``   trainers that publish weights, and engines that follow (``channel_schedule``, ``channel_weights``, ``channel_truth``, ``channel_run``)
``found``      schedules that catch those of them which few seeds do
"""
