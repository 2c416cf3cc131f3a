"""Code that all training stages share.

accelerator      start accelerate, set seeds and threads, put networks on their devices
sharding         networks cut into one part for each process (FSDP2)
compiling        decoder layers compiled by torch, on a GPU
random_streams   seeds, generators and the order of the data
memory           how many rows a pass holds, and what happens when memory runs out
processes        sharing rows among processes, and summing over them
row_by_row       measuring every row of a data set
optimizer        AdamW, learning rates, gradient norms
step             the learner, and one optimizer step in microbatches
state            the training loop: how it is saved, stopped and resumed
checkpoints      its state on disk
supervised       code that SFT, reward model and DPO share
preferences      comparisons: training steps on them, and evaluation
"""
