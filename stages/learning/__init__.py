"""What every stage that learns shares.

loop          seeds, optimizer, schedules, batches, sampling
state         all that a loop must save to go on
checkpoints   that state on disk
sharding      several processes, and networks cut into a part for each
saving        a network that has learned becomes a plain model on disk
fitting       out of memory: smaller microbatches
models        load, save, run, sample
vocabulary    log-probabilities without all logits at once
cache         the sampler's keys and values
heads         the scalar head of a reward model, in any family
lora          small matrices beside frozen weights
likelihood    the SFT loss
shared_query  several summaries of one post in one row
preferences   held-out comparisons, ranked
released      reward models that others trained, in our layout
"""
