"""What every stage that learns shares.

loop          accelerator, optimizer, schedules, measuring row by row
learner       rows of a step, microbatches that fit into memory, optimizer steps
state         all that a loop must save to go on
supervised    begin, batches and rates of SFT, reward model and DPO
checkpoints   that state on disk, and the weights of others' checkpoints
sharding      several processes, and networks cut into a part for each
models        load and save; the scalar head of a reward model, in any family
passes        forward passes: log-probabilities, values, scores; the SFT loss
sampling      responses drawn from a policy
vocabulary    log-probabilities without all logits at once
lora          small matrices beside frozen weights; merged models on disk
preferences   comparisons: steps on them, and held-out ones, ranked
"""
