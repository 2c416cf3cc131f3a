"""What a command does: which stages run, and how they are started.

targets     all targets and variables of `make`, and its help
variables   reads and checks the variables of a command
plan        which stages are missing or stale, and why each of them runs
runner      runs the stages of a plan one after the other
start       runs one stage in this process, and cleans up after it
launch      a stage in several processes: GPUS, ENGINE, LAUNCH
terminal    the table of stages that a terminal shows
status      the command `make status`
end         the last lines of a command
model_cards the README.md of a saved model
grid        ablations, algorithms, and a study over sizes and seeds
"""
