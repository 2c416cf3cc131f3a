"""Which stages run, and how they are started.

main     the targets of one command: a run, or a grid of runs
goals    every target and variable of `make`
wanted   the stages that are missing or stale
maker    starts stages one after the other
start    one stage: its arguments, errors, signals and trackers
launch   a stage in several processes, through accelerate
grid     ablations, algorithms, and a study over sizes and seeds
"""
