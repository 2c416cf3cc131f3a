"""Which stages run, and how they are started.

targets     every target and variable of `make`, and its help
variables   reads and checks what was typed
wanted      the stages that are missing or stale
runner      runs them one after the other
start       one stage in this process: its errors, and what it leaves behind
launch      a stage in several processes: GPUS, ENGINE, LAUNCH
terminal    the table of stages that a terminal shows
status      the command `make status`
end         the last lines of a command
model_cards the README.md of a saved model
trackers    wandb and TensorBoard
grid        ablations, algorithms, and a study over sizes and seeds
"""
