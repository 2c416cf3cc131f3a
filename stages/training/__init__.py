"""What every stage that trains shares.

loop          accelerator, optimizer, schedules, measuring row by row
learner       rows of a step, microbatches that fit into memory, optimizer steps
state         all that a loop must save to resume
supervised    start, batches and rates of SFT, reward model and DPO
preferences   comparisons: optimizer steps on them, and held-out ones, ranked
checkpoints   that state on disk
sharding      several processes, and networks sharded over them
"""
