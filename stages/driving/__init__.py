"""What drives stages. Standard library only at the top.

start     a stage's command line: errors in one line, signals, wandb and TensorBoard
wanted    which stages a command makes, and what would be refused hours later
maker     makes the stages of runs: processes, or forks after libraries are loaded once
grid      many runs: ablations and rivals over seeds, the study over presets and seeds
"""
