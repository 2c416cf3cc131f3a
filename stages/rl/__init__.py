"""One update of a policy-gradient algorithm, step by step.

algorithms     the table of algorithms: how rewards become advantages, default settings
networks       policy, critic, frozen networks, and the learner that owns them
episodes       one update's episodes as tensors
rollout        1. sample, 2. measure, 3. score
value_range    the range of the critic's values, if they are bounded
advantages     4. assign rewards to tokens, 5. compute advantages
loss           what step 6 minimizes
pretraining    the SFT loss on references, if it is mixed in
update         6. optimize: minibatches and optimizer steps
metrics        metrics of an update, samples, warnings
start_checks   checks before the first update
update_checks  checks of the first updates, which are computed a second way
"""
