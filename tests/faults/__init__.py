"""Seeded faults: what the tests of the Metal path catch, shown by breaking the code in one place at a time.

    python tests/faults                          the chosen faults, and a sample of 60 mechanical ones
    python tests/faults --chosen
    python tests/faults --mechanical 20 --seed 7
    python tests/faults --all                    every mechanical one: about half an hour on two cores

Copies of the sources are broken, never the sources themselves. It needs the simulated Metal device.
"""
