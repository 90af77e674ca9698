"""The simulator: the real engine on simulated machines, clocks and storage. One seed decides
everything that happens.

``loop``       virtual time, and processes that can pause and die
``schedule``   the data that defines a run: storage, actors, faults, delays; drawn from a seed
``posix``      a file system with a volatile and a durable side, under the real local driver
``remote``     an object store and HDFS; requests can be refused, lost, late or executed twice
``engine``     the real engine without threads, with small chunks
``world``      one run: processes, storage, and faults at their moment
``actors``     jobs of several ranks: saves, loads, copies, prunes
``endings``    recovery after all processes die at some moment of a run, or at its end
``checker``    the invariants: at each moment, and after a crash
``broken``     engines that are wrong on purpose
``blocking``   blocking calls, each in its own thread; one thread runs at a time
``channels``   trainers that publish weights, and engines that follow (``channel_schedule``,
               ``channel_weights``, ``channel_truth``, ``channel_run``)
``found``      schedules that catch the broken engines that few seeds catch
"""
